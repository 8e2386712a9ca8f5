"""κ equals published figures, hand-worked ones, and what theory says of annotators with known error rates."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from annotation_samples import item, row

from remind.refmem.agreement import agreement, decisions, fleiss, phrase

pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")

#: Votes of 14 raters on 10 subjects over 5 categories: the worked example in the article on Fleiss' κ.
WORKED = [
    (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
    (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
]  # fmt: skip


def test_the_worked_example_and_one_by_hand() -> None:
    subjects = [tuple(str(c) for c, n in enumerate(counts) for _ in range(n)) for counts in WORKED]
    assert fleiss(subjects) == pytest.approx(0.210, abs=5e-4)
    # P̄ = (1 + 1/3 + 1) / 3 = 7/9; p(x) = 5/9, p(y) = 4/9, P̄e = 41/81; κ = (63 - 41) / (81 - 41)
    assert fleiss([("x", "x", "x"), ("x", "x", "y"), ("y", "y", "y")]) == pytest.approx(22 / 40)


def test_undefined_is_none_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for subjects in ([], [("x",), ("y",)], [("x", "x"), ("x", "x")]):
        assert fleiss(subjects) is None
    items = [item("a"), item("b")]
    alone = agreement(items, {one.id: {"x": row(one, "x", "A")} for one in items}, ["x"])
    assert alone["all"]["kappa"] is alone["remove"]["kappa"] is None


def test_single_choice_gives_the_kappa_of_theory() -> None:
    """Truth uniform over 4 options; annotator i errs with e_i, then uniformly over the other three.

    Two agree if both are right or both make the same error: (1-e)(1-f) + ef/3. Each marginal is uniform, so chance
    agreement is 1/4.
    """
    errors, n, draw = (0.05, 0.15, 0.30), 6000, random.Random(11)
    items = [item(f"i{k}") for k in range(n)]
    ballots = {}
    for given in items:
        truth = draw.choice("ABCD")
        votes = [draw.choice([c for c in "ABCD" if c != truth]) if draw.random() < e else truth for e in errors]
        ballots[given.id] = {name: row(given, name, vote) for name, vote in zip("xyz", votes, strict=True)}
    figures = agreement(items, ballots, list("xyz"))
    pairs = [(1 - e) * (1 - f) + e * f / 3 for e, f in combinations(errors, 2)]
    wanted = (sum(pairs) / 3 - 1 / 4) / (3 / 4)
    # an item's share of agreeing pairs lies in [0, 1]: its deviation is at most 1/2; four standard errors
    tolerance = 4 * 0.5 / math.sqrt(n) / (3 / 4)
    assert tolerance < 0.04
    assert figures["formats"]["single"]["kappa"] == pytest.approx(wanted, abs=tolerance)
    assert figures["dimensions"]["pattern_induction"]["single"] == figures["formats"]["single"]
    assert figures["formats"]["single"]["subjects"] == n
    # as yes or no to each option: two agree on an option in 1 - 2 P(differ)/4 of the cases; P(yes) is 1/4
    binary = [1 - 2 * (1 - p) / 4 for p in pairs]
    chance = (1 / 4) ** 2 + (3 / 4) ** 2
    assert figures["all"]["kappa"] == pytest.approx((sum(binary) / 3 - chance) / (1 - chance), abs=tolerance)
    assert figures["all"]["subjects"] == 4 * n


def test_multiple_choice_gives_the_kappa_of_theory() -> None:
    """Each option is right with probability q; annotator i flips each with e_i. Agreement (1-e)(1-f) + ef; P(yes) is
    the mean over annotators of q(1-e) + (1-q)e."""
    errors, q, n, draw = (0.05, 0.10, 0.25), 0.4, 2500, random.Random(5)
    items = [item(f"m{k}", "multi") for k in range(n)]
    ballots, subjects, used = {}, [], 0
    for given in items:
        truth = [draw.random() < q for _ in range(4)]
        votes = ["".join(c for c, t in zip("ABCD", truth, strict=True) if t ^ (draw.random() < e)) for e in errors]
        used += all(votes)
        ballots[given.id] = {name: row(given, name, vote) for name, vote in zip("xyz", votes, strict=True)}
        # an empty set is no answer in a file; for this count it is one, so that the options stay independent
        subjects += zip(*(map(str, decisions(given, vote)) for vote in votes), strict=True)
    yes = sum(q * (1 - e) + (1 - q) * e for e in errors) / 3
    chance = yes**2 + (1 - yes) ** 2
    wanted = (sum((1 - e) * (1 - f) + e * f for e, f in combinations(errors, 2)) / 3 - chance) / (1 - chance)
    assert fleiss(subjects) == pytest.approx(wanted, abs=4 * 0.5 / math.sqrt(4 * n) / 0.48)
    figures = agreement(items, ballots, list("xyz"))["formats"]["multi"]
    assert (figures["items"], figures["subjects"], figures["left_out"]) == (used, 4 * used, n - used)


def test_direct_answers_are_votes_on_candidates_and_one_for_an_own_answer() -> None:
    given = item("d", "direct")
    assert decisions(given, ("A Quiet  Life!",)) == (True, False, False, False)
    assert decisions(given, ("a loud life", "sailing")) == (False, True, False, True)
    assert phrase("Ｃafé, au lait.") == "café au lait"
    assert phrase("!?") == "!?"


def test_items_that_someone_skipped_or_only_flagged_are_left_out_and_counted() -> None:
    items = [item("a"), item("b"), item("c")]
    ballots = {
        "a": {"x": row(items[0], "x", "A"), "y": row(items[0], "y", "B")},
        "b": {"x": row(items[1], "x", "B")},
        "c": {"x": row(items[2], "x", "C"), "y": row(items[2], "y", (), remove=True, confidence=None)},
    }
    figures = agreement(items, ballots, ["x", "y"])
    # one subject with the votes A and B: P̄ = 0, P̄e = 1/2
    assert figures["formats"]["single"] == {"kappa": pytest.approx(-1), "items": 1, "subjects": 1, "left_out": 2}
    assert figures["remove"]["items"] == 2
    # keep-keep and keep-remove: P̄ = 1/2, p = 3/4 and 1/4, P̄e = 5/8
    assert figures["remove"]["kappa"] == pytest.approx((1 / 2 - 5 / 8) / (3 / 8))
