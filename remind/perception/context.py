"""What the turns around lend a turn: a Gaussian average that ends with the session."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Context:
    """The Gaussian over the turns of each session.

    Args:
        lengths: how many turns each session has; n together.
        sigma: its width in turns; 0: a turn has no company.
    """

    def __init__(self, lengths: Sequence[int], sigma: float) -> None:
        self.reach = math.ceil(3 * sigma)
        self._kernel = np.ones(1)
        if sigma > 0:
            self._kernel = np.exp(-0.5 * (np.arange(-self.reach, self.reach + 1) / sigma) ** 2)
            self._kernel /= self._kernel.sum()
        # sessions stand so far apart that none sees the next
        number = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        self._places = np.arange(len(number)) + self.reach * number
        self._length = int(self._places[-1]) + self.reach + 1

    def mix(self, values: np.ndarray, share: float) -> np.ndarray:
        """(1 − share) × values + share × their Gaussian average over the session, float64 [n]; zeros beyond."""
        if self.reach == 0 or share == 0:
            return values
        return (1 - share) * values + share * self.smooth(values)

    def smooth(self, values: np.ndarray) -> np.ndarray:
        """Their Gaussian average over the session [n], in the precision of the values."""
        spread = np.zeros(self._length, dtype=values.dtype)
        spread[self._places] = values
        kernel = self._kernel[self.reach :].astype(values.dtype)
        smooth = spread * kernel[0]
        for offset in range(1, self.reach + 1):
            lent = spread * kernel[offset]
            smooth[offset:] += lent[:-offset]
            smooth[:-offset] += lent[offset:]
        found: np.ndarray = smooth[self._places]
        return found

    def mix_at(self, rows: np.ndarray, values: np.ndarray, share: float) -> np.ndarray:
        """`mix` at these positions alone [m]; only the values of `around(rows)` are looked at."""
        if self.reach == 0 or share == 0:
            return np.asarray(values[rows])
        near = np.arange(-self.reach, self.reach + 1)
        windows = rows[:, None] + near
        inside = (self._places[rows][:, None] + near) == self._places[windows.clip(0, len(values) - 1)]
        smooth = (np.where(inside, values[windows.clip(0, len(values) - 1)], 0.0) * self._kernel).sum(axis=1)
        found: np.ndarray = (1 - share) * values[rows] + share * smooth
        return found

    def around(self, rows: np.ndarray) -> np.ndarray:
        """These positions and those in reach of them, ascending."""
        near = np.zeros(len(self._places), dtype=bool)
        windows = rows[:, None] + np.arange(-self.reach, self.reach + 1)
        near[windows.clip(0, len(near) - 1)] = True
        return np.flatnonzero(near)
