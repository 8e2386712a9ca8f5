"""Items by falling score where only the best ones matter: no more are sorted, or scored exactly, than are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

#: How much more than its budget holds is ranked at first; bounds come in another order than scores.
_AHEAD = 1.5


def first_count(budget: int, prices: np.ndarray) -> int:
    """About how many items of these prices to rank first to find what fits a budget."""
    return int(_AHEAD * budget / max(1.0, float(prices.mean()))) + 16


def falling(
    scores: np.ndarray, first: int, exact: Callable[[np.ndarray], np.ndarray] | None = None
) -> Iterator[list[int]]:
    """All positions by falling score (ties: earlier first), in stretches.

    Args:
        scores: of every item [n]; with `exact`, upper bounds on the scores.
        first: about how many make the first stretch; the next ones are longer.
        exact: the scores of some items, given their positions; None: the bounds are the scores.
    """
    values = scores if exact is None else scores.copy()
    scored, returned = np.full(len(scores), exact is None), np.zeros(len(scores), dtype=bool)
    count, level = max(1, first), np.inf
    while level > -np.inf:
        left = np.flatnonzero(~returned)
        level = -np.inf
        if len(left) > count:
            level = float(np.partition(values[left], len(left) - count)[len(left) - count])
        new = left[(values[left] >= level) & ~scored[left]]
        if exact is not None and len(new):
            values[new] = exact(new)
            scored[new] = True
        # what is not scored lies below the level
        ready = left[scored[left] & (values[left] >= level)]
        returned[ready] = True
        count *= 2
        if len(ready):
            yield ready[np.lexsort((ready, -values[ready]))].tolist()
