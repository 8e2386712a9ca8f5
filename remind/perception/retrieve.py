"""Question-conditioned retrieval (Eq. 1): which segments of the dialogue become C_ret.

`cue` is Eq. 1 as it stands; `hybrid` (see `hybrid`) spends exactly the tokens Eq. 1 would spend.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from remind.perception.config import RetrieveConfig
from remind.perception.costs import Section
from remind.perception.ranking import first_count
from remind.states.pyramid import Segment, segments_of

if TYPE_CHECKING:
    from remind.perception.index import DialogueIndex

_log = logging.getLogger(__name__)


class Retrieved(NamedTuple):
    """C_ret in time order, and whether `max_context_tokens` left out what the share of Eq. 1 would keep."""

    segments: tuple[Segment, ...]
    capped: bool


def relevance(question: Tensor, cues: Tensor, norms: Tensor | None = None) -> Tensor:
    """Eq. 1: η_n, cosine of φ(q) [d] and φ(κ_n) [N, d] → [N]; 0 where a vector is zero.

    Args:
        norms: lengths of the cues' vectors [N]; None: computed here.
    """
    lengths = cues.norm(dim=-1) if norms is None else norms
    return (cues @ question) / (question.norm() * lengths).clamp_min(1e-12)


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
    whole = range(len(index.prices))
    # the first comparison is a sum of an array; the second counts headings too, of what is known to be short
    most = min(config.whole_tokens, config.max_context_tokens or config.whole_tokens)
    if index.prices.sum() <= most and index.cost(whole) <= most:
        return Retrieved(segments_of(index.dialogue, whole), False)
    cues = index.cues(dimension).scan
    retrieved = retrieve_segments(index, lambda first: cues.falling(vector, first), vector, config)
    if config.method == "cue":
        return retrieved
    # it needs `relevance`
    from remind.perception.hybrid import retrieve_turns

    budget = index.cost([p for segment in retrieved.segments for p in range(segment.start, segment.end + 1)])
    return Retrieved(retrieve_turns(index, question, vector, config, budget), retrieved.capped)


def retrieve_segments(
    index: DialogueIndex, ranked_from: Callable[[int], Iterator[list[int]]], vector: Tensor, config: RetrieveConfig
) -> Retrieved:
    """The top share of segments by score (ties: earlier first), less the lowest while they exceed the cap.

    Where the best segment alone exceeds it, that segment is cut to the turns around the one closest to the question.

    Args:
        ranked_from: segments by falling score, in stretches, given about how many make the first one.
    """
    cap, most = config.max_context_tokens, top_count(len(index.segments), config.top_share)
    limit: float = math.inf if cap is None else cap
    section = Section(index)
    # a segment adds at least its turns less a gap line it closes: once the cap is passed, more can only add
    final = int(index.lengths.min()) >= index.costs.gap
    ranked: list[Segment] = []
    fitting = 0
    first = most if cap is None else min(most, first_count(cap, index.lengths))
    for number in chain.from_iterable(ranked_from(first)):
        segment = index.segments[number]
        section.add(segment.start, segment.end)
        ranked.append(segment)
        if section.spent <= limit:
            fitting = len(ranked)
        elif final:
            break
        if len(ranked) == most:
            break
    if fitting == 0 and cap is not None:
        return Retrieved((_cut(index, ranked[0], vector, cap),), True)
    return Retrieved(tuple(sorted(ranked[:fitting], key=lambda segment: segment.start)), fitting < most)


def _cut(index: DialogueIndex, segment: Segment, vector: Tensor, limit: int) -> Segment:
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
        _log.warning("dialogue %s: turn %s takes %d tokens, more than %d", index.dialogue.id, turn.id, spent, limit)
    return Segment(low, high)
