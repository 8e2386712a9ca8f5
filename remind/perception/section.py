"""The dialogue section of a prompt while turns are added to it."""

from __future__ import annotations

import math

import numpy as np

from remind.perception.index import DialogueIndex


class Section:
    """Turns chosen so far, and the tokens their section takes.

    What a stretch of turns costs depends on its neighbours: the first of a session brings the heading, one away from
    the others a gap line, one between two of them removes one.

    Attributes:
        spent: tokens, as `DialogueIndex.cost` counts them.
    """

    def __init__(self, index: DialogueIndex) -> None:
        self._index, self._gap = index, index.costs.gap
        # with a place before the first turn and one after the last; bytes, which are read one by one faster than arrays
        self._chosen = bytearray(len(index.prices) + 2)
        self._opened = bytearray(len(index.costs.headings))
        self.spent = 0

    def room(self, budget: int) -> float:
        """Tokens left; without end as long as nothing is spent."""
        return budget - self.spent if self.spent else math.inf

    def price(self, start: int, end: int | None = None) -> int:
        """What turns start to end of one session would add; none of them is there yet."""
        turns, sessions = self._index.costs.turns, self._index.session_of
        tokens = turns[start] if end is None else sum(turns[start : end + 1])
        last, session = start if end is None else end, sessions[start]
        if not self._opened[session]:
            return tokens + self._index.costs.headings[session]
        touching = 0
        if self._chosen[start] and sessions[start - 1] == session:
            touching += 1
        if self._chosen[last + 2] and sessions[last + 1] == session:
            touching += 1
        return tokens + (1 - touching) * self._gap

    def prices(self, positions: np.ndarray) -> np.ndarray:
        """`price` of single turns [m]; of those that are there, more than there can be room for."""
        index = self._index
        chosen, opened = np.frombuffer(self._chosen, dtype=bool), np.frombuffer(self._opened, dtype=bool)
        sessions = index.sessions[positions]
        touching = (chosen[positions] & index.follows[positions]).astype(np.int64)
        touching += chosen[positions + 2] & index.follows[positions + 1]
        added = np.where(opened[sessions], (1 - touching) * self._gap, index.headings[sessions])
        return np.where(chosen[positions + 1], np.iinfo(np.int64).max, index.prices[positions] + added)

    def add(self, start: int, end: int | None = None) -> None:
        """Put turns start to end of one session there; none of them is there yet."""
        last = start if end is None else end
        self.spent += self.price(start, end)
        self._opened[self._index.session_of[start]] = 1
        self._chosen[start + 1 : last + 2] = b"\1" * (last + 1 - start)

    def positions(self) -> list[int]:
        """The turns that are there, ascending."""
        found: list[int] = np.flatnonzero(np.frombuffer(self._chosen, dtype=bool)[1:-1]).tolist()
        return found
