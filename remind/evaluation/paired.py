"""Differences between two runs that answered the same questions: paired bootstrap, by question or by dialogue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypedDict

import numpy as np

from remind.core.errors import ConfigError

_DRAWN_AT_ONCE = 2_000_000  # indices held in memory: 16 MB


class Difference(TypedDict):
    """Mean of the second run less mean of the first, over `n` questions that both have a score for.

    low, high: 95 % percentile interval. p: two-sided, see `paired_bootstrap`. units: what was resampled, questions or
    dialogues. With fewer than two units nothing can be said of the spread: low, high and p are None.
    """

    first: float
    second: float
    value: float
    low: float | None
    high: float | None
    p: float | None
    n: int
    units: int


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference | None:
    """Resample the questions, each with both of its scores; None for no questions.

    p is the share of resamples whose mean difference lies at least as far from the observed one as that lies from 0,
    i.e. the bootstrap distribution moved to the hypothesis of no difference; (count + 1) / (resamples + 1), never 0.

    Args:
        first, second: scores [n] of the same questions in the same order.
        clusters: the dialogue of each question [n]. Whole dialogues are then resampled, since answers about one
            dialogue rise and fall together; the mean stays the mean over questions.

    Raises:
        ConfigError: lengths that differ, or resamples below 1.
    """
    if len(first) != len(second) or (clusters is not None and len(clusters) != len(first)):
        raise ConfigError(f"paired scores must be of one length, not {len(first)} and {len(second)}")
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, not {resamples}")
    if len(first) == 0:
        return None
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    gains = two - one
    sums: np.ndarray = gains
    sizes: np.ndarray = np.ones(len(gains))
    if clusters is not None:
        place = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
        member = [place[name] for name in clusters]
        sums, sizes = np.bincount(member, weights=gains), np.bincount(member, weights=sizes)
    value = float(gains.mean())
    result = Difference(
        first=float(one.mean()),
        second=float(two.mean()),
        value=value,
        low=None,
        high=None,
        p=None,
        n=len(gains),
        units=len(sums),
    )
    if len(sums) < 2:
        return result
    means = _means(sums, sizes, resamples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    # rounding must not make an equal distance a shorter one
    far = np.abs(means - value) >= abs(value) - 1e-12
    return Difference(
        **{**result, "low": float(low), "high": float(high), "p": float((far.sum() + 1) / (resamples + 1))}
    )


def _means(sums: np.ndarray, sizes: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed)
    step = max(1, _DRAWN_AT_ONCE // len(sums))
    parts = []
    for start in range(0, resamples, step):
        chosen = draws.integers(len(sums), size=(min(step, resamples - start), len(sums)))
        parts.append(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1))
    return np.concatenate(parts)
