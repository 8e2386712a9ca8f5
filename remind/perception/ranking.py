"""Items by falling score where only the best ones matter: no more are sorted, or scored exactly, than are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

#: How many bounds are made exact at a time where one item is looked for.
_FEW = 16


class Ranking:
    """n items, known by an upper bound on the score of each. Of equal scores the earlier item comes first.

    Args:
        upper: at least the score of every item [n].
        exact: the scores of some items, given their positions; None: the bounds are the scores.
    """

    def __init__(self, upper: np.ndarray, exact: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        self._exact = exact
        #: Scores of the items that are scored, bounds of the others.
        self._values = upper if exact is None else upper.copy()
        self._scored = np.full(len(upper), exact is None)

    def __len__(self) -> int:
        return len(self._values)

    def score(self, position: int) -> float:
        """The score of an item that was given out."""
        return float(self._values[position])

    def falling(self, first: int) -> Iterator[list[int]]:
        """All positions by falling score, in stretches.

        Args:
            first: about how many make the first stretch; the next ones are longer.
        """
        given, count = np.zeros(len(self), dtype=bool), max(1, first)
        level = np.inf
        while level > -np.inf:
            left = np.flatnonzero(~given)
            level = -np.inf
            if len(left) > count:
                bounds = self._values[left]
                level = float(np.partition(bounds, len(left) - count)[len(left) - count])
                self._score(left[bounds >= level])
            else:
                self._score(left)
            # what is not scored lies below the level
            ready = left[self._scored[left] & (self._values[left] >= level)]
            given[ready] = True
            count *= 2
            if len(ready):
                yield ready[np.lexsort((ready, -self._values[ready]))].tolist()

    def following(self, position: int, among: np.ndarray) -> int | None:
        """The first of these positions (ascending) that comes after an item that was given out; None if none does."""
        last = self._values[position]
        while True:
            values, scored = self._values[among], self._scored[among]
            ahead = ~scored | (values < last) | ((values == last) & (among > position))
            among, values, scored = among[ahead], values[ahead], scored[ahead]
            if len(among) == 0:
                return None
            top = values.max()
            if not (~scored & (values >= top)).any():
                return int(among[values.argmax()])
            bounds = np.where(scored, -np.inf, values)
            level = np.partition(bounds, len(bounds) - _FEW)[len(bounds) - _FEW] if len(bounds) > _FEW else -np.inf
            self._score(among[~scored & (bounds >= level)])

    def _score(self, positions: np.ndarray) -> None:
        new = positions[~self._scored[positions]]
        if len(new) and self._exact is not None:
            self._values[new] = self._exact(new)
            self._scored[new] = True
