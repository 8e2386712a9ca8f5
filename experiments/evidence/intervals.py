"""Bootstrap intervals over questions, and over dialogues with all their questions."""

from __future__ import annotations

import numpy as np


def bootstrap_means(values: np.ndarray, resamples: int = 2000, seed: int = 0) -> np.ndarray:
    """Means of `values` [n] over questions drawn with replacement; [resamples]."""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return np.asarray(values[draws].mean(1))


def clustered_means(values: np.ndarray, cluster: np.ndarray, resamples: int = 2000, seed: int = 0) -> np.ndarray:
    """Means over whole clusters drawn with replacement, as many as there are; a cluster brings all its values."""
    _, number = np.unique(cluster, return_inverse=True)
    sums, sizes = np.bincount(number, weights=values), np.bincount(number)
    draws = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    return np.asarray(sums[draws].sum(1) / sizes[draws].sum(1))


def interval(means: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
