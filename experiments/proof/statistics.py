"""Means and paired differences with 95 % intervals over seeds and test dialogues together.

All seeds answer the same test questions, and questions of one dialogue go together. So both seeds and dialogues are
drawn with replacement, crossed, and a mean over what was drawn is one resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t  # type: ignore[import-untyped]

from remind.core.errors import DataError
from remind.evaluation.statistics import Estimate, interval

Array = NDArray[np.float64]


def to_array(rows: Sequence[str]) -> Array:
    """[seeds, questions] of strings of ones and zeros. Raises DataError where they differ in length."""
    if len({len(row) for row in rows}) != 1:
        raise DataError("runs that are compared answered different numbers of questions; remove them and run again")
    return np.array([[float(mark) for mark in row] for row in rows])


def stretch(n: int) -> float:
    """What deviations of n units are multiplied by, so that resampling few of them is as wide as Student's t.

    A bootstrap over n units has a variance too small by (n − 1)/n, and the tails of the normal: with five seeds an
    interval would be a third too narrow.
    """
    return 1.0 if n < 2 else float(t.ppf(0.975, n - 1) / norm.ppf(0.975)) * sqrt(n / (n - 1))


@cache
def draws(seeds: int, dialogues: int, resamples: int) -> tuple[Array, Array]:
    """How often each seed [resamples, seeds] and each dialogue [resamples, dialogues] is drawn; always the same."""
    rng = np.random.default_rng(0)
    counts = [rng.multinomial(n, np.full(n, 1 / n), resamples).astype(float) for n in (seeds, dialogues)]
    return counts[0], counts[1]


def resampled_means(values: Array, dialogues: Sequence[str], resamples: int, seeds: int | None = None) -> Array:
    """[resamples]: means of values [seeds, questions] over the seeds and dialogues drawn.

    Args:
        dialogues: the dialogue of each question.
        seeds: number of seeds, where values [1, questions] are equal for all of them.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(dialogues))}
    place = np.array([places[name] for name in dialogues])
    sizes: Array = np.bincount(place).astype(float)
    of_seeds, of_dialogues = draws(seeds or len(values), len(sizes), resamples)
    units = np.stack([np.bincount(place, row, len(sizes)) for row in values]) / sizes
    weights = sizes / sizes.sum()
    grand = float(units.mean(0) @ weights)
    seed_effects, dialogue_effects = units @ weights - grand, units.mean(0) - grand
    units = units + (stretch(len(values)) - 1) * seed_effects[:, None]
    units = units + (stretch(len(sizes)) - 1) * dialogue_effects
    drawn = of_seeds @ units / len(values) if len(values) > 1 else units
    questions = of_dialogues * sizes
    means: Array = (drawn * questions).sum(1) / questions.sum(1)
    return means


def estimate(values: Array, dialogues: Sequence[str], resamples: int) -> Estimate:
    """Mean of values [seeds, questions] with the percentile interval of `resampled_means`; n: questions times seeds."""
    return _estimate(float(values.mean()), resampled_means(values, dialogues, resamples), values.size)


def share_of(part: Array, whole: Array, dialogues: Sequence[str], resamples: int) -> Estimate | None:
    """Mean of part [seeds, questions] as a share of that of whole [1, questions], both drawn together.

    None where the mean of `whole` is not above 0.
    """
    if whole.mean() <= 0:
        return None
    numerator = resampled_means(part, dialogues, resamples)
    denominator = np.maximum(resampled_means(whole, dialogues, resamples, len(part)), 1e-9)
    return _estimate(float(part.mean() / whole.mean()), numerator / denominator, part.size)


def _estimate(value: float, means: Array, n: int) -> Estimate:
    low, high = interval(means)
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=n)
