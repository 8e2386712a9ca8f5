"""Question-conditioned retrieval (Eq. 1): which segments of the dialogue become C_ret.

`cue` is Eq. 1 as it stands. `hybrid` (not in the paper) takes single turns by BM25 and cosine together, and spends
exactly the tokens Eq. 1 would spend: z-scores over the dialogue's turns, mixed with a Gaussian average over the
neighbours in the session.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from remind.perception.config import RetrieveConfig
from remind.states.pyramid import Segment, segments_of
from remind.text.words import stems

if TYPE_CHECKING:
    from remind.perception.index import DialogueIndex

_log = logging.getLogger(__name__)
#: A spread of scores that is rounding alone.
_NO_SPREAD = 1e-9
#: hybrid: width in turns of the Gaussian over the neighbours in the session, and the shares of a turn's BM25 and cosine
#: that come from them.
SIGMA, LEXICAL_CONTEXT, DENSE_CONTEXT = 2.5, 0.8, 0.3


class Retrieved(NamedTuple):
    """C_ret in time order, and whether `max_context_tokens` left out what the share of Eq. 1 would keep."""

    segments: tuple[Segment, ...]
    capped: bool


def relevance(question: Tensor, cues: Tensor) -> np.ndarray:
    """Eq. 1: η_n, cosine of φ(q) [d] and φ(κ_n), unit rows [N, d] → float64 [N]."""
    return np.asarray((cues @ question).double().numpy())


def by_falling(scores: np.ndarray) -> list[int]:
    """Positions by falling score; ties: earlier first."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order


def top_count(n: int, share: float) -> int:
    """k_1 = ceil(share × n), at least 1; the product is rounded so that 0.2 × 15 is 3 and nothing above."""
    return min(n, max(1, math.ceil(round(share * n, 9))))


def retrieve(
    index: DialogueIndex, question: str, vector: Tensor, dimension: str | None, config: RetrieveConfig
) -> Retrieved:
    """C_ret, at most `max_context_tokens` long unless a single turn is longer; short dialogues whole.

    Args:
        question, vector: the question's text and φ of it [d].
        dimension: which cues Eq. 1 compares with.
    """
    whole = range(len(index.vectors))
    if index.cost(whole) <= min(config.whole_tokens, config.max_context_tokens or config.whole_tokens):
        return Retrieved(segments_of(index.dialogue, whole), False)
    ranked = by_falling(relevance(vector, index.cues(dimension).vectors))
    retrieved = take_segments(index, ranked, vector, config)
    if config.method == "cue":
        return retrieved
    budget = index.cost([p for segment in retrieved.segments for p in range(segment.start, segment.end + 1)])
    turns = take_turns(index, turn_scores(index, question, vector), budget)
    return Retrieved(segments_of(index.dialogue, turns), retrieved.capped)


def take_segments(index: DialogueIndex, ranked: list[int], vector: Tensor, config: RetrieveConfig) -> Retrieved:
    """The top share of segments, less the lowest while they exceed the cap.

    Where the best segment alone exceeds it, that segment is cut to the turns around the one closest to the question.

    Args:
        ranked: numbers of segments, the best first.
    """
    limit = math.inf if config.max_context_tokens is None else config.max_context_tokens
    top = [index.segments[number] for number in ranked[: top_count(len(index.segments), config.top_share)]]
    section, fitting = Section(index), 0
    for count, segment in enumerate(top, start=1):
        section.add(segment.start, segment.end)
        if section.spent <= limit:
            fitting = count
    if fitting == 0:
        return Retrieved((_cut(index, top[0], vector, limit),), True)
    return Retrieved(tuple(sorted(top[:fitting], key=lambda segment: segment.start)), fitting < len(top))


def _cut(index: DialogueIndex, segment: Segment, vector: Tensor, limit: float) -> Segment:
    """The longest run in the segment, grown from its turn closest to the question, that fits; at least that turn."""
    closeness = relevance(vector, index.vectors[segment.start : segment.end + 1])
    low = high = segment.start + int(closeness.argmax())
    while True:
        grown = [(a, b) for a, b in ((low, high + 1), (low - 1, high)) if segment.start <= a and b <= segment.end]
        fitting = [(a, b) for a, b in grown if index.cost(range(a, b + 1)) <= limit]
        if not fitting:
            break
        low, high = max(fitting, key=lambda ends: closeness[(ends[1] if ends[1] > high else ends[0]) - segment.start])
    spent = index.cost(range(low, high + 1))
    if spent > limit:
        turn = index.dialogue.turns[low]
        _log.warning("dialogue %s: turn %s takes %d tokens, more than %s", index.dialogue.id, turn.id, spent, limit)
    return Segment(low, high)


class Section:
    """Turns chosen so far, and the tokens their dialogue section takes.

    What a stretch of turns costs depends on its neighbours: the first of a session brings the heading, one away from
    the others a gap line, one between two of them removes one.

    Attributes:
        chosen: positions of the turns.
        spent: tokens, as `DialogueIndex.cost` counts them.
    """

    def __init__(self, index: DialogueIndex) -> None:
        self._index = index
        self._opened: set[int] = set()
        self.chosen: set[int] = set()
        self.spent = 0

    def price(self, start: int, end: int) -> int:
        """Tokens that turns start to end (inclusive) of one session would add; none of them is chosen yet."""
        costs, sessions = self._index.costs, self._index.session_of
        tokens, session = sum(costs.turns[start : end + 1]), sessions[start]
        if session not in self._opened:
            return tokens + costs.headings[session]
        touching = sum(near in self.chosen and sessions[near] == session for near in (start - 1, end + 1))
        return tokens + (1 - touching) * costs.gap

    def add(self, start: int, end: int) -> None:
        """Choose turns start to end (inclusive) of one session; none of them is chosen yet."""
        self.spent += self.price(start, end)
        self._opened.add(self._index.session_of[start])
        self.chosen.update(range(start, end + 1))


def turn_scores(index: DialogueIndex, question: str, vector: Tensor) -> np.ndarray:
    """Score of every turn [n]: z-scores of BM25 and of the cosine, each mixed with those of the turns around."""
    lexical = standardise(index.bm25.scores(stems(question)))
    dense = standardise(relevance(vector, index.vectors))
    # one average for both, which is linear
    around = LEXICAL_CONTEXT * lexical + DENSE_CONTEXT * dense
    # the difference is exactly 0 without an average, so that ties stay ties
    return lexical + dense + (session_average(around, np.array(index.session_of), SIGMA) - around)


def take_turns(index: DialogueIndex, scores: np.ndarray, budget: int) -> list[int]:
    """Positions, ascending, of the best turns (ties: earlier first) that fit a budget of prompt tokens together.

    At least the best one. A turn that does not fit is passed over for lower ones that do.
    """
    section, least = Section(index), min(index.costs.turns) - index.costs.gap
    for position in by_falling(scores):
        if not section.chosen or section.spent + section.price(position, position) <= budget:
            section.add(position, position)
        if section.spent + least > budget:
            break
    return sorted(section.chosen)


def standardise(values: np.ndarray) -> np.ndarray:
    """z-scores [n]; zeros where all values are the same."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > _NO_SPREAD else np.zeros_like(values)


def session_average(values: np.ndarray, sessions: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian average of each value over its session; zeros beyond its ends.

    Args:
        values: one for every turn, float64 [n].
        sessions: number of the session of every turn, ascending [n].
        sigma: width of the Gaussian in turns; 0: the values themselves.
    """
    reach = math.ceil(3 * sigma)
    if reach == 0:
        return values
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    # sessions stand so far apart that no kernel reaches the next one
    places = np.arange(len(values)) + reach * sessions
    spread = np.zeros(places[-1] + 1)
    spread[places] = values
    return np.convolve(spread, kernel / kernel.sum())[reach + places]
