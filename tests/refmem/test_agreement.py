"""κ equals published figures and hand-worked ones."""

from __future__ import annotations

import pytest
from annotation_samples import item, row

from remind.refmem.agreement import agreement, decisions, phrase

pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")


def test_one_annotator_agrees_with_nobody() -> None:
    items = [item("a"), item("b")]
    alone = agreement(items, {one.id: {"x": row(one, "x", "A")} for one in items}, ["x"])
    assert alone["all"]["kappa"] is alone["remove"]["kappa"] is None


def test_letters_are_categories_and_options_decisions() -> None:
    """Two annotators: B and B, B and C; and of several answers A and C, and A."""
    items = [item("a"), item("b"), item("m", "multi")]
    votes = {"a": ("B", "B"), "b": ("B", "C"), "m": ("AC", "A")}
    ballots = {
        one.id: {name: row(one, name, vote) for name, vote in zip("xy", votes[one.id], strict=True)} for one in items
    }
    figures = agreement(items, ballots, ["x", "y"])
    # letters: P̄ = 1/2, p = 3/4 and 1/4, P̄e = 5/8. options of m: P̄ = 3/4, p(yes) = 3/8, P̄e = 34/64
    assert figures["formats"]["single"]["kappa"] == pytest.approx((1 / 2 - 5 / 8) / (3 / 8))
    assert figures["formats"]["multi"]["kappa"] == pytest.approx((3 / 4 - 34 / 64) / (30 / 64))
    assert [figures["formats"][kind]["subjects"] for kind in ("single", "multi")] == [2, 4]
    # the options of all three: P̄ = 9/12, 7 of 24 yes
    assert figures["all"]["kappa"] == pytest.approx((3 / 4 - 338 / 576) / (238 / 576))
    assert figures["dimensions"]["pattern_induction"]["single"] == figures["formats"]["single"]


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
