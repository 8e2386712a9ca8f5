"""95 % intervals. Both treat questions as independent, although questions about one dialogue are not quite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

_DRAWN_AT_ONCE = 1_000_000  # indices held in memory: 8 MB
_Z = 1.959963984540054  # 97.5 % point of the standard normal


class Estimate(TypedDict):
    """A mean over `n` questions with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(values: Sequence[float]) -> Estimate | None:
    """Share of ones among zeros and ones, with Wilson's score interval; None for no values."""
    n = len(values)
    if n == 0:
        return None
    share = sum(values) / n
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    # at 0 and 1 the bound is exact; rounding must not put the share outside
    return Estimate(value=share, low=min(share, max(0.0, centre - half)), high=max(share, min(1.0, centre + half)), n=n)


def bootstrap(values: Sequence[float], resamples: int = 1000, seed: int = 0) -> Estimate | None:
    """Mean with the percentile interval of resampled means; None for no values."""
    if len(values) == 0:
        return None
    data = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed)
    step = max(1, _DRAWN_AT_ONCE // len(data))
    sizes = (min(step, resamples - start) for start in range(0, resamples, step))
    means = [data[draws.integers(len(data), size=(size, len(data)))].mean(axis=1) for size in sizes]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Estimate(value=float(data.mean()), low=float(low), high=float(high), n=len(data))
