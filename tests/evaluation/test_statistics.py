"""Bootstraps against enumeration of every resample; κ against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from remind.evaluation.statistics import bootstrap, cohen_kappa, fleiss_kappa, paired_bootstrap, ratio, share, wilson


def every_mean(sums: list[float], sizes: list[int]) -> np.ndarray:
    """The mean of every one of the n^n resamples, all equally likely."""
    draws = list(itertools.product(range(len(sums)), repeat=len(sums)))
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
    means, value = every_mean(sums, sizes), sum(sums) / sum(sizes)
    found = paired_bootstrap(first, second, clusters and list(clusters), resamples=40_000)
    assert found is not None
    assert (found["value"], found["n"], found["units"]) == (pytest.approx(value), len(first), len(sums))
    assert (found["first"], found["second"]) == pytest.approx((np.mean(first), np.mean(second)))
    bounds = [pytest.approx(bound, abs=0.02) for bound in np.percentile(means, [2.5, 97.5])]
    assert [found["low"], found["high"]] == bounds
    assert found["p"] == pytest.approx(np.mean(np.abs(means - value) >= value - 1e-12), abs=0.01)
    if clusters:
        # the interval of a share knows of dialogues, too
        one = share(second, list(clusters), resamples=40_000)
        assert one is not None
        assert [one["value"], one["low"], one["high"]] == [pytest.approx(value), *bounds]


def test_edges_of_intervals() -> None:
    values = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert bootstrap([]) is wilson([]) is share([], []) is paired_bootstrap([], []) is None
    # one dialogue, and a dialogue for each question
    assert share(values, ["a"] * 7) == share(values, list("abcdefg")) == wilson(values)
    # six answers about two dialogues that are all right say as much as two
    assert share([1.0] * 6, list("aaabbb")) == {**(wilson([1.0, 1.0]) or {}), "n": 6}
    same = paired_bootstrap(values, values) or {}
    assert [same[name] for name in ("value", "low", "high", "p")] == [0.0, 0.0, 0.0, 1.0]
    for single in (paired_bootstrap([0.0], [1.0]), paired_bootstrap([0.0, 0.0], [1.0, 0.0], ["a", "a"])):
        assert [(single or {})[name] for name in ("low", "high", "p", "units")] == [None, None, None, 1]


def test_the_ratio_of_sums_over_dialogues() -> None:
    # a twice, a and b, b twice
    found = ratio([(1.0, 2.0), (2.0, 2.0), (0.0, 4.0)], ["a", "a", "b"], 500)
    assert found == {"value": 3 / 8, "low": 0.0, "high": 3 / 4}
    assert ratio([(1.0, 0.0), (1.0, 2.0)], "ab", 500) == {"value": 1.0, "low": 0.5, "high": 1.0}
    assert ratio([(0.0, 0.0)], ["a"], 10)["value"] is None


#: Votes of 14 raters on 10 subjects over 5 categories: the worked example in the article on Fleiss' κ.
WORKED = [
    (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
    (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
]  # fmt: skip


def test_kappa_of_worked_examples() -> None:
    pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")
    subjects = [tuple(str(c) for c, n in enumerate(counts) for _ in range(n)) for counts in WORKED]
    assert fleiss_kappa(subjects) == pytest.approx(0.210, abs=5e-4)
    # P̄ = (1 + 1/3 + 1) / 3 = 7/9; p(x) = 5/9, p(y) = 4/9, P̄e = 41/81; κ = (63 - 41) / (81 - 41)
    assert fleiss_kappa([("x", "x", "x"), ("x", "x", "y"), ("y", "y", "y")]) == pytest.approx(22 / 40)
    for undefined in ([], [("x",), ("y",)], [("x", "x"), ("x", "x")]):
        assert fleiss_kappa(undefined) is None
    # agree on 3 of 4; chance 3/4 · 1/2 + 1/4 · 1/2 = 1/2
    assert cohen_kappa([True, True, True, False], [True, True, False, False]) == pytest.approx(1 / 2)
    assert cohen_kappa([True, True], [True, True]) is cohen_kappa([], []) is None
