"""The bootstraps against enumeration of every resample; Wilson's interval against its equation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from remind.core.errors import ConfigError
from remind.evaluation.intervals import bootstrap, paired_bootstrap, share, wilson


def every_mean(sums: list[float], sizes: list[int]) -> np.ndarray:
    """The mean of every one of the n^n resamples, all equally likely."""
    n = len(sums)
    draws = list(itertools.product(range(n), repeat=n))
    return np.array([sum(sums[i] for i in draw) / sum(sizes[i] for i in draw) for draw in draws])


@pytest.mark.parametrize(
    ("first", "second", "clusters", "sums", "sizes"),
    [
        ([0.0, 1.0, 0.25, 0.5, 0.0], [1.0, 1.0, 0.5, 0.25, 0.75], None, [1.0, 0.0, 0.25, -0.25, 0.75], [1] * 5),
        ([0.0] * 7, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "abaacdd", [2.0, 1.0, 0.0, 1.0], [3, 1, 1, 2]),
    ],
)
def test_against_every_resample(
    first: list[float], second: list[float], clusters: str | None, sums: list[float], sizes: list[int]
) -> None:
    means = every_mean(sums, sizes)
    found = paired_bootstrap(first, second, clusters and list(clusters), resamples=40_000)
    assert found is not None
    value = sum(sums) / sum(sizes)
    assert (found["value"], found["n"], found["units"]) == (pytest.approx(value), len(first), len(sums))
    assert (found["first"], found["second"]) == pytest.approx((np.mean(first), np.mean(second)))
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.02)
    assert found["p"] == pytest.approx(np.mean(np.abs(means - value) >= value - 1e-12), abs=0.01)


def test_bootstrap_edges() -> None:
    assert (bootstrap([]), wilson([])) == (None, None)
    assert bootstrap([0.5]) == {"value": 0.5, "low": 0.5, "high": 0.5, "n": 1}
    values = np.random.default_rng(0).beta(2, 5, size=400).tolist()
    estimate = bootstrap(values, 500, seed=3)
    gain = paired_bootstrap([0.0] * 400, values, resamples=500, seed=3)
    assert estimate is not None
    assert gain is not None
    assert all(estimate[key] == gain[key] for key in ("value", "low", "high", "n"))


def test_the_interval_of_a_share_knows_of_dialogues() -> None:
    values, dialogues = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], list("abaacdd")
    means = every_mean([2.0, 1.0, 0.0, 1.0], [3, 1, 1, 2])
    found = share(values, dialogues, resamples=40_000)
    assert found is not None
    assert (found["value"], found["n"]) == (pytest.approx(4 / 7), 7)
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.02)
    # one dialogue, a dialogue for each question, and none
    assert share(values, ["a"] * 7) == share(values, list("abcdefg")) == wilson(values)
    assert share([], []) is None
    # six answers about two dialogues that are all right say as much as two
    sure, two = share([1.0] * 6, list("aaabbb")), wilson([1.0, 1.0])
    assert sure is not None
    assert two is not None
    assert sure == {**two, "n": 6}


@pytest.mark.parametrize(("ones", "n"), [(0, 1), (0, 10), (3, 10), (10, 10), (500, 1000), (1, 1)])
def test_wilson_bounds_solve_its_equation(ones: int, n: int) -> None:
    estimate = wilson([1.0] * ones + [0.0] * (n - ones))
    assert estimate is not None
    assert 0 <= estimate["low"] <= estimate["value"] == ones / n <= estimate["high"] <= 1
    for bound in (estimate["low"], estimate["high"]):
        # |share - p| = z sqrt(p (1 - p) / n)
        assert (ones / n - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n, abs=1e-6)
    assert (estimate["low"] == 0.0) == (ones == 0)
    assert (estimate["high"] == 1.0) == (ones == n)


def test_edges() -> None:
    assert paired_bootstrap([], []) is None
    four = [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    assert paired_bootstrap(*four, list("abcd")) == paired_bootstrap(*four) == paired_bootstrap(*four)
    same = paired_bootstrap([0.3, 0.7, 1.0], [0.3, 0.7, 1.0])
    assert same is not None
    assert (same["value"], same["low"], same["high"], same["p"]) == (0.0, 0.0, 0.0, 1.0)
    for single in (paired_bootstrap([0.0], [1.0]), paired_bootstrap([0.0, 0.0], [1.0, 0.0], ["a", "a"])):
        assert single is not None
        assert (single["low"], single["high"], single["p"], single["units"]) == (None, None, None, 1)
    for wrong in (([0.0], []), ([0.0], [1.0], [])):
        with pytest.raises(ConfigError, match="one length"):
            paired_bootstrap(*wrong)
    with pytest.raises(ConfigError, match="at least 1"):
        paired_bootstrap([0.0], [1.0], resamples=0)
