"""Question-conditioned retrieval (Section 4.2): which turns of the dialogue become C_ret.

`cue` is Eq. 1 as it stands. `hybrid` spends exactly the tokens Eq. 1 would spend, but on segments drawn round the turns
that score best in words and meaning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from remind.errors import ConfigError
from remind.perception.index import DialogueIndex
from remind.perception.lexical import stems
from remind.pyramid import Segment

_log = logging.getLogger(__name__)


@dataclass
class RetrieveConfig:
    """What is retrieved, and how much of it."""

    method: Literal["cue", "hybrid"] = "cue"
    """cue: Eq. 1, the segments whose cues are closest to the question. hybrid: turns by BM25 and sentence vectors
    together, merged into segments, within the tokens Eq. 1 would spend."""
    top_share: float = 0.2
    """Share of the dialogue's segments to keep; ceil(top_share × N) of them."""
    max_context_tokens: int = 7200
    """Cap on the dialogue section of the prompt, in tokens of the sentence encoder; the lowest segments go first."""
    sigma: float = 2.5
    """hybrid: width in turns of the Gaussian that lends a turn the scores of its neighbours in the session."""
    lexical_context: float = 0.8
    """hybrid: share of the BM25 score that comes from that neighbourhood; the rest is the turn's own."""
    dense_context: float = 0.3
    """hybrid: the same for the cosine."""

    def __post_init__(self) -> None:
        if self.method not in ("cue", "hybrid"):
            raise ConfigError(f"retrieve: no method {self.method!r}; there are cue and hybrid")
        if not 0 < self.top_share <= 1:
            raise ConfigError(f"retrieve: top_share {self.top_share} must be above 0 and at most 1")
        if self.max_context_tokens < 1:
            raise ConfigError("retrieve: max_context_tokens must be at least 1")
        if self.sigma < 0 or not 0 <= self.lexical_context <= 1 or not 0 <= self.dense_context <= 1:
            raise ConfigError("retrieve: sigma must not be negative, and the context shares lie between 0 and 1")


def relevance(question: Tensor, cues: Tensor) -> Tensor:
    """Eq. 1: η_n, cosine of φ(q) [d] and φ(κ_n) [N, d] → [N]; 0 where a vector is zero."""
    norms = (question.norm() * cues.norm(dim=-1)).clamp_min(1e-12)
    return (cues @ question) / norms


def top_count(n: int, share: float) -> int:
    """k_1 = ceil(share × n), at least 1; the product is rounded so that 0.2 × 15 is 3 and nothing above."""
    return min(n, max(1, math.ceil(round(share * n, 9))))


def retrieve(
    index: DialogueIndex, question: str, vector: Tensor, dimension: str | None, config: RetrieveConfig
) -> tuple[Segment, ...]:
    """C_ret in time order, at most `max_context_tokens` long unless a single turn is longer.

    Args:
        question, vector: the question's text and φ of it [d].
        dimension: which cues Eq. 1 compares with.
    """
    scores = relevance(vector, index.cues(dimension).vectors).double().numpy()
    kept = retrieve_segments(index, scores, vector, config)
    if config.method == "cue":
        return kept
    budget = index.cost([p for part in kept for p in range(part.start, part.end + 1)])
    return runs(index, take_turns(index, turn_scores(index, question, vector, config), budget))


def retrieve_segments(
    index: DialogueIndex, scores: np.ndarray, vector: Tensor, config: RetrieveConfig
) -> tuple[Segment, ...]:
    """The top share of segments by score [N] (ties: earlier first), less the lowest while they exceed the cap.

    Where the best segment alone exceeds it, that segment is cut to the turns round the one closest to the question.
    """
    order = np.argsort(-scores, kind="stable")[: top_count(len(index.segments), config.top_share)]
    ranked = [index.segments[number] for number in order]
    while len(ranked) > 1 and index.cost(_positions(ranked)) > config.max_context_tokens:
        ranked.pop()
    if len(ranked) == 1 and index.cost(_positions(ranked)) > config.max_context_tokens:
        return (_cut(index, ranked[0], vector, config.max_context_tokens),)
    return tuple(sorted(ranked, key=lambda part: part.start))


def _positions(segments: Sequence[Segment]) -> list[int]:
    return [p for part in sorted(segments, key=lambda s: s.start) for p in range(part.start, part.end + 1)]


def _cut(index: DialogueIndex, part: Segment, vector: Tensor, limit: int) -> Segment:
    """The longest run in the segment, grown from its turn closest to the question, that fits; at least that turn."""
    closeness = relevance(vector, index.vectors[part.start : part.end + 1])
    low = high = part.start + int(closeness.argmax())
    while True:
        grown = [(a, b) for a, b in ((low, high + 1), (low - 1, high)) if part.start <= a and b <= part.end]
        fitting = [(a, b) for a, b in grown if index.cost(range(a, b + 1)) <= limit]
        if not fitting:
            break
        low, high = max(fitting, key=lambda ends: closeness[(ends[1] if ends[1] > high else ends[0]) - part.start])
    spent = index.cost(range(low, high + 1))
    if spent > limit:
        turn = index.dialogue.turns[low]
        _log.warning("dialogue %s: turn %s takes %d tokens, more than %d", index.dialogue.id, turn.id, spent, limit)
    return Segment(low, high)


def turn_scores(index: DialogueIndex, question: str, vector: Tensor, config: RetrieveConfig) -> np.ndarray:
    """Score of every turn [n]: z-scores of BM25 and of the cosine, each mixed with those of the turns around."""
    lexical = _standardise(index.bm25.scores(stems(question)))
    dense = _standardise(relevance(vector, index.vectors).double().numpy())
    return _mix(index, lexical, config.sigma, config.lexical_context) + _mix(
        index, dense, config.sigma, config.dense_context
    )


def _standardise(values: np.ndarray) -> np.ndarray:
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-9 else np.zeros_like(values)


def _mix(index: DialogueIndex, values: np.ndarray, sigma: float, share: float) -> np.ndarray:
    """(1 − share) × values + share × their Gaussian average over the session (zeros beyond its ends)."""
    if sigma == 0 or share == 0:
        return values
    reach = math.ceil(3 * sigma)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    smooth, start = np.empty_like(values), 0
    for session in index.dialogue.sessions:
        end = start + len(session.turns)
        if end > start:
            smooth[start:end] = np.convolve(values[start:end], kernel)[reach : reach + end - start]
        start = end
    return (1 - share) * values + share * smooth


def take_turns(index: DialogueIndex, scores: np.ndarray, budget: int) -> list[int]:
    """Positions, ascending, of the best turns that fit a budget of prompt tokens together; at least the best one.

    A turn that does not fit is passed over for lower ones that do. What a turn costs depends on its neighbours: the
    first of a session brings the heading, one away from the others a gap line, one between two of them removes one.
    """
    costs, session_of, n = index.costs, index.session_of, len(scores)
    chosen = np.zeros(n, dtype=bool)
    opened: set[int] = set()
    spent, cheapest = 0, min(costs.turns)
    for position in np.argsort(-scores, kind="stable").tolist():
        session = session_of[position]
        touching = sum(
            0 <= other < n and bool(chosen[other]) and session_of[other] == session
            for other in (position - 1, position + 1)
        )
        price = costs.turns[position]
        price += (1 - touching) * costs.gap if session in opened else costs.headings[session]
        if spent and spent + price > budget:
            if spent + cheapest - costs.gap > budget:
                break
            continue
        chosen[position] = True
        opened.add(session)
        spent += price
    return np.flatnonzero(chosen).tolist()


def runs(index: DialogueIndex, positions: Sequence[int]) -> tuple[Segment, ...]:
    """Ascending positions joined into segments; none crosses a session."""
    joined: list[list[int]] = []
    for position in positions:
        if joined and joined[-1][1] == position - 1 and index.session_of[position] == index.session_of[position - 1]:
            joined[-1][1] = position
        else:
            joined.append([position, position])
    return tuple(Segment(start, end) for start, end in joined)
