"""Hybrid retrieval (not in the paper): single turns by BM25 and cosine together, within a budget of prompt tokens.

Scores are z-scores over the dialogue's turns, mixed with a Gaussian average over the neighbours in the session.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from remind.perception.config import RetrieveConfig
from remind.perception.costs import Section
from remind.perception.ranking import falling, first_count
from remind.perception.retrieve import relevance
from remind.states.pyramid import Segment, segments_of
from remind.text.words import stems

if TYPE_CHECKING:
    from remind.perception.index import DialogueIndex

#: A spread of scores that is rounding alone.
_NO_SPREAD = 1e-9


def retrieve_turns(
    index: DialogueIndex, question: str, vector: Tensor, config: RetrieveConfig, budget: int
) -> tuple[Segment, ...]:
    """The best turns that fit a budget of prompt tokens, joined into segments."""
    return segments_of(index.dialogue, take_turns(index, turn_scores(index, question, vector, config), budget))


def turn_scores(index: DialogueIndex, question: str, vector: Tensor, config: RetrieveConfig) -> np.ndarray:
    """Score of every turn [n]: z-scores of BM25 and of the cosine, each mixed with those of the turns around."""
    lexical = standardise(index.bm25.scores(stems(question)))
    dense = standardise(relevance(vector, index.vectors, index.norms).double().numpy())
    # one average for both, which is linear
    around = config.lexical_context * lexical + config.dense_context * dense
    # the difference is exactly 0 without an average, so that ties stay ties
    return lexical + dense + (session_average(around, index.sessions, config.sigma) - around)


def take_turns(index: DialogueIndex, scores: np.ndarray, budget: int) -> list[int]:
    """Positions, ascending, of the best turns (ties: earlier first) that fit a budget of prompt tokens together.

    At least the best one. A turn that does not fit is passed over for lower ones that do.
    """
    section = Section(index)
    position = 0
    for position in next(falling(scores, first_count(budget, index.prices))):
        if section.price(position, position) <= section.room(budget):
            section.add(position, position)
    pool, widest = np.zeros(0, dtype=np.int64), -1.0
    while True:
        room = section.room(budget)
        # a turn that closes a gap can make room
        pool = np.arange(len(scores)) if room > widest else pool
        behind = (scores[pool] < scores[position]) | ((scores[pool] == scores[position]) & (pool > position))
        pool, widest = pool[behind & (index.prices[pool] - index.costs.gap <= room)], room
        fitting = pool[section.prices(pool) <= room]
        if not len(fitting):
            return section.positions()
        position = int(fitting[scores[fitting].argmax()])
        section.add(position, position)


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
