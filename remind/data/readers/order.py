"""Where a file of contexts and questions can be cut, so that every piece is whole and the order stays the file's."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence


def cuts(contexts: int, asked: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The smallest pieces, as (how many further contexts, how many further questions), in order.

    A piece holds the context of each of its questions, and pieces end to end give contexts and questions in the order
    of the file. Where questions come in the order of their contexts, each context is a piece.

    Args:
        asked: for each question, the number of its context.
    """
    first, last = array("q", [len(asked)]) * (contexts + 1), array("q", [-1]) * contexts
    for question, context in enumerate(asked):
        first[context] = min(first[context], question)
        last[context] = question
    for context in range(contexts - 1, 0, -1):
        first[context] = min(first[context], first[context + 1])
    taken = (0, 0)
    latest = -1
    for context in range(contexts):
        latest = max(latest, last[context])
        # all questions up to the latest one are of contexts up to here
        if latest < first[context + 1]:
            yield context + 1 - taken[0], latest + 1 - taken[1]
            taken = (context + 1, latest + 1)
