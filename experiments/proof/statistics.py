"""Accuracies and paired differences with 95 % intervals over seeds and test dialogues together.

All seeds answer the same test questions, and questions of one dialogue go together. So both seeds and dialogues are
drawn with replacement, crossed, and a mean over what was drawn is one resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t  # type: ignore[import-untyped]

from remind.core.errors import DataError
from remind.evaluation.intervals import Estimate

Array = NDArray[np.float64]
_Z = 1.959963984540054  # 97.5 % point of the standard normal


def marks(rows: Sequence[str]) -> Array:
    """[seeds, questions] of strings of ones and zeros. Raises DataError where they differ in length."""
    if len({len(row) for row in rows}) != 1:
        raise DataError("runs that are compared answered different numbers of questions; remove them and run again")
    return np.array([[float(mark) for mark in row] for row in rows])


def stretch(n: int) -> float:
    """What deviations of n units are multiplied by, so that resampling few of them is as wide as Student's t.

    A bootstrap over n units has a variance too small by (n − 1)/n, and the tails of the normal: with five seeds an
    interval would be a third too narrow.
    """
    return 1.0 if n < 2 else float(t.ppf(0.975, n - 1)) / _Z * sqrt(n / (n - 1))


class Resamples:
    """The draws, made once, so that statistics that are put together are drawn together.

    Args:
        seeds: how many.
        dialogues: [questions], the dialogue of each.
        resamples: how many draws. seed: of the draws.
    """

    def __init__(self, seeds: int, dialogues: Sequence[str], resamples: int = 4000, seed: int = 0) -> None:
        names = {name: place for place, name in enumerate(dict.fromkeys(dialogues))}
        self.place = np.array([names[name] for name in dialogues])
        self.sizes: Array = np.bincount(self.place).astype(float)
        self.seeds, count = seeds, len(names)
        rng = np.random.default_rng(seed)
        #: how often each seed and each dialogue was drawn, [resamples, …]
        self.of_seeds: Array = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples).astype(float)
        self.of_dialogues: Array = rng.multinomial(count, np.full(count, 1 / count), resamples).astype(float)

    @cached_property
    def _questions(self) -> Array:
        drawn: Array = self.of_dialogues * self.sizes
        return drawn

    def means(self, values: Array) -> Array:
        """[resamples]: means of values [seeds, questions] over what was drawn; [1, questions]: equal for all seeds."""
        units = np.stack([np.bincount(self.place, row, len(self.sizes)) for row in values]) / self.sizes
        weights = self.sizes / self.sizes.sum()
        grand = float(units.mean(0) @ weights)
        of_seeds, of_dialogues = units @ weights - grand, units.mean(0) - grand
        units = units + (stretch(len(values)) - 1) * of_seeds[:, None]
        units = units + (stretch(len(self.sizes)) - 1) * of_dialogues
        drawn = self.of_seeds @ units / self.seeds if len(values) > 1 else units
        found: Array = (drawn * self._questions).sum(1) / self._questions.sum(1)
        return found

    def estimate(self, values: Array) -> Estimate:
        """Mean with the percentile interval of `means`; n: questions times seeds."""
        return _estimate(float(values.mean()), self.means(values), values.size)

    def share(self, part: Array, whole: Array) -> Estimate | None:
        """Mean of `part` as a share of that of `whole`, both drawn together; None where `whole` is not above 0."""
        if whole.mean() <= 0:
            return None
        low = np.maximum(self.means(whole), 1e-9)
        return _estimate(float(part.mean() / whole.mean()), self.means(part) / low, part.size)


def _estimate(value: float, draws: Array, n: int) -> Estimate:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value), n=n)
