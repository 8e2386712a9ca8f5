"""Question-conditioned retrieval (Section 4.2): which turns of the dialogue become C_ret.

`cue` is Eq. 1 as it stands. `hybrid` spends exactly the tokens Eq. 1 would spend, but on segments drawn round the turns
that score best in words and meaning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from torch import Tensor

from remind.core.errors import ConfigError
from remind.perception.context import Context
from remind.perception.index import DialogueIndex
from remind.perception.ranking import Ranking
from remind.perception.scan import Scan, relevance
from remind.perception.section import Section
from remind.states.pyramid import Segment
from remind.text.words import stems

__all__ = ["RetrieveConfig", "relevance", "retrieve", "retrieve_segments", "runs", "take_turns", "turn_scores"]

#: How much more than its budget holds is ranked at first; bounds come in another order than scores.
_AHEAD = 1.5
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
    kept = retrieve_segments(index, _cosines(index.cues(dimension).scan, vector), vector, config)
    if config.method == "cue":
        return kept
    budget = index.cost([p for part in kept for p in range(part.start, part.end + 1)])
    return runs(index, take_turns(index, turn_ranking(index, question, vector, config), budget))


def _cosines(scan: Scan, vector: Tensor) -> Ranking:
    if not scan.coded:
        return Ranking(scan.exact(vector))
    return Ranking(scan.upper(vector), lambda rows: scan.exact(vector, rows))


def retrieve_segments(
    index: DialogueIndex, scores: np.ndarray | Ranking, vector: Tensor, config: RetrieveConfig
) -> tuple[Segment, ...]:
    """The top share of segments by score [N] (ties: earlier first), less the lowest while they exceed the cap.

    Where the best segment alone exceeds it, that segment is cut to the turns round the one closest to the question.
    """
    ranking = scores if isinstance(scores, Ranking) else Ranking(scores)
    limit, most = config.max_context_tokens, top_count(len(index.segments), config.top_share)
    section = Section(index)
    # a segment adds at least its turns less a gap line it closes: once the cap is passed, more can only add
    final = int(index.lengths.min()) >= index.costs.gap
    ranked: list[Segment] = []
    fitting = 0
    for number in chain.from_iterable(ranking.falling(min(most, _first(limit, index.lengths)))):
        part = index.segments[number]
        section.add(part.start, part.end)
        ranked.append(part)
        if section.spent <= limit:
            fitting = len(ranked)
        elif final:
            break
        if len(ranked) == most:
            break
    if fitting == 0:
        return (_cut(index, ranked[0], vector, limit),)
    return tuple(sorted(ranked[:fitting], key=lambda part: part.start))


def _first(budget: int, prices: np.ndarray) -> int:
    """About how many items of these prices to look at first for what fits a budget."""
    return int(_AHEAD * budget / max(1.0, float(prices.mean()))) + 16


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
    context = Context([len(session.turns) for session in index.dialogue.sessions], config.sigma)
    lexical = _standardise(index.bm25.scores(stems(question)))
    dense = _standardise(relevance(vector, index.vectors).double().numpy())
    return context.mix(lexical, config.lexical_context) + context.mix(dense, config.dense_context)


def turn_ranking(index: DialogueIndex, question: str, vector: Tensor, config: RetrieveConfig) -> Ranking:
    """`turn_scores` as a ranking; of a long dialogue, cosines are taken only round the turns that may come first."""
    scan = index.scan
    if not scan.coded:
        return Ranking(turn_scores(index, question, vector, config))
    context = index.context(config.sigma)
    lexical = _standardise(index.bm25.scores(stems(question)))
    mean, deviation = scan.moments(vector)
    if deviation <= _SAME:
        return Ranking(context.mix(lexical, config.lexical_context))

    def exact(rows: np.ndarray) -> np.ndarray:
        around = context.around(rows)
        dense = np.zeros(len(lexical))
        dense[around] = (scan.exact(vector, around) - mean) / deviation
        mixed = context.mix_at(rows, dense, config.dense_context)
        return context.mix_at(rows, lexical, config.lexical_context) + mixed

    # shares and kernel are never negative, so that bounds mix to bounds; both are smoothed in one go
    near, far = lexical.astype(np.float32), (scan.upper(vector) - mean) / deviation
    upper = (1 - config.lexical_context) * near + (1 - config.dense_context) * far
    upper += context.smooth(config.lexical_context * near + config.dense_context * far)
    return Ranking(upper.astype(np.float64) + _ROUNDING * (1 + float(np.abs(upper).max())), exact)


#: A spread of scores that is rounding alone.
_SAME = 1e-9
#: Of float32, where bounds are mixed.
_ROUNDING = 1e-4


def _standardise(values: np.ndarray) -> np.ndarray:
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > _SAME else np.zeros_like(values)


def take_turns(index: DialogueIndex, scores: np.ndarray | Ranking, budget: int) -> list[int]:
    """Positions, ascending, of the best turns that fit a budget of prompt tokens together; at least the best one.

    A turn that does not fit is passed over for lower ones that do.
    """
    ranking = scores if isinstance(scores, Ranking) else Ranking(scores)
    section = Section(index)
    position = 0
    for position in next(ranking.falling(_first(budget, index.prices))):
        if section.price(position) <= section.room(budget):
            section.add(position)
    pool, widest = np.zeros(0, dtype=np.int64), -1.0
    while True:
        room = section.room(budget)
        # a turn that closes a gap can make room
        pool = np.arange(len(ranking)) if room > widest else pool
        pool, widest = pool[index.prices[pool] - index.costs.gap <= room], room
        found = ranking.following(position, pool[section.prices(pool) <= room])
        if found is None:
            return section.positions()
        position = found
        section.add(position)


def runs(index: DialogueIndex, positions: Sequence[int]) -> tuple[Segment, ...]:
    """Ascending positions joined into segments; none crosses a session."""
    joined: list[list[int]] = []
    for position in positions:
        if joined and joined[-1][1] == position - 1 and index.session_of[position] == index.session_of[position - 1]:
            joined[-1][1] = position
        else:
            joined.append([position, position])
    return tuple(Segment(start, end) for start, end in joined)
