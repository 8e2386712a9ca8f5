"""95 % intervals, paired differences, and agreement beyond chance.

Intervals are Wilson's for shares, and percentile bootstraps for means, ratios and differences of two runs. Answers
about one dialogue rise and fall together, so that dialogues are resampled wherever there are several. Without clusters,
and of one dialogue, questions count as independent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from remind.core import optional

_DRAWN_AT_ONCE = 2_000_000  # indices held in memory: 16 MB


#: A mean over `n` questions with its 95 % interval: value, low, high, n.
Estimate = dict[str, Any]
#: Mean of the second run less mean of the first, over `n` questions that both have a score for: first, second, value,
#: low and high (95 % percentile interval), p (two-sided, see `paired_bootstrap`), n, units (what was resampled,
#: questions or dialogues). With fewer than two units nothing can be said of the spread: low, high and p are None.
Difference = dict[str, Any]


def wilson(values: Sequence[float]) -> Estimate | None:
    """Share of ones among zeros and ones, with Wilson's score interval; None for no values."""
    if len(values) == 0:
        return None
    from scipy import stats  # type: ignore[import-untyped]

    found = stats.binomtest(int(sum(values)), len(values)).proportion_ci(method="wilson")
    return Estimate(value=sum(values) / len(values), low=float(found.low), high=float(found.high), n=len(values))


def several(clusters: Sequence[Hashable]) -> Sequence[Hashable] | None:
    """The clusters where there are two or more; of a single one nothing but its values can be resampled."""
    return clusters if len(set(clusters)) > 1 else None


def share(
    values: Sequence[float], clusters: Sequence[Hashable], resamples: int = 1000, seed: int = 0
) -> Estimate | None:
    """Share of ones with an interval that knows of clusters; None for no values.

    Where several clusters hold more than a value each they are resampled, else the interval is Wilson's. So it is where
    all values agree, which resampling takes for certainty; its n is then the number of clusters.
    """
    units = len(set(clusters))
    clustered = 1 < units < len(values)
    if clustered and min(values) < max(values):
        return bootstrap(values, resamples, seed, clusters)
    estimate = wilson([values[0]] * units if clustered else values)
    return None if estimate is None else {**estimate, "n": len(values)}


def cluster_bootstrap(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[Hashable] | np.ndarray | None = None,
    resamples: int = 1000,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """Means of resamples, float64 [resamples]; `interval` makes a confidence interval of them.

    A resample draws as many clusters with replacement as there are, each with all of its values; the mean is over
    values, so that large clusters weigh more.

    Args:
        values: [n].
        clusters: [n], what each value belongs to, e.g. its dialogue; None: every value by itself.
        seed: of the draws.
        weights: [n], whose sum the sum of the values is divided by, in place of their number.
    """
    names = range(len(values)) if clusters is None else list(clusters)
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    places = [number[name] for name in names]
    shares = np.ones(len(values)) if weights is None else np.asarray(weights)
    sums, sizes = np.bincount(places, np.asarray(values)), np.bincount(places, shares)

    def mean(tops: np.ndarray, bottoms: np.ndarray, axis: int) -> np.ndarray:
        quotient: np.ndarray = tops.sum(axis) / bottoms.sum(axis)
        return quotient

    if len(number) == 1:
        return np.full(resamples, sums[0] / sizes[0])
    batch = max(1, _DRAWN_AT_ONCE // len(number))
    draws = {"n_resamples": resamples, "batch": batch, "rng": np.random.default_rng(seed)}
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may have no weight
        from scipy import stats

        found = stats.bootstrap((sums, sizes), mean, paired=True, vectorized=True, method="percentile", **draws)
    means: np.ndarray = found.bootstrap_distribution
    return means


def interval(means: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval of resampled means."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def bootstrap(
    values: Sequence[float], resamples: int = 1000, seed: int = 0, clusters: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Mean with the percentile interval of resampled means; None for no values. `clusters` as in cluster_bootstrap."""
    if len(values) == 0:
        return None
    low, high = interval(cluster_bootstrap(values, clusters, resamples, seed))
    return Estimate(value=float(np.mean(values)), low=low, high=high, n=len(values))


def ratio(
    pairs: Sequence[tuple[float, float]], clusters: Sequence[Hashable], resamples: int
) -> dict[str, float | None]:
    """Σ first / Σ second with the percentile interval of resampled clusters; None where all second are 0."""
    tops, bottoms = zip(*pairs, strict=True) if pairs else ((), ())
    if sum(bottoms) <= 0:
        return {"value": None, "low": None, "high": None}
    means = cluster_bootstrap(tops, clusters, resamples, weights=bottoms)
    low, high = interval(means[np.isfinite(means)])
    return {"value": float(sum(tops) / sum(bottoms)), "low": low, "high": high}


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference | None:
    """Difference of two runs over the same questions, each resampled with both of its scores; None for no questions.

    p is the share of resamples whose mean difference lies at least as far from the observed one as that lies from 0,
    i.e. the bootstrap distribution moved to the hypothesis of no difference; (count + 1) / (resamples + 1), never 0.

    Args:
        first, second: scores [n] of the same questions in the same order.
        clusters: the dialogue of each question [n]. Whole dialogues are then resampled, since answers about one
            dialogue rise and fall together; the mean stays the mean over questions.
    """
    if len(first) == 0:
        return None
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    value = float((two - one).mean())
    units = len(first) if clusters is None else len(set(clusters))
    low = high = p = None
    if units > 1:
        means = cluster_bootstrap(two - one, clusters, resamples, seed)
        low, high = interval(means)
        # rounding must not make an equal distance a shorter one
        far = np.abs(means - value) >= abs(value) - 1e-12
        p = float((far.sum() + 1) / (resamples + 1))
    return Difference(
        first=float(one.mean()), second=float(two.mean()), value=value, low=low, high=high, p=p, n=len(one), units=units
    )


def fleiss_kappa(subjects: Sequence[Sequence[str]]) -> float | None:
    """Fleiss' κ of subjects with one label per rater; None where it is undefined: no subject, one rater, or one label.

    Raises:
        ModelError: statsmodels is not installed.
    """
    if not subjects or len(subjects[0]) < 2:
        return None
    library = optional("statsmodels.stats.inter_rater", "Agreement")
    counts, labels = library.aggregate_raters(np.array(subjects))
    if len(labels) < 2:
        return None
    kappa = float(library.fleiss_kappa(counts, method="fleiss"))
    return kappa if math.isfinite(kappa) else None
