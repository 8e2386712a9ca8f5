"""Rewards of MemBuilder and SaliMory against numbers worked out by hand from the equations."""

from __future__ import annotations

import math

import pytest

from remind.core.errors import DataError
from remind.memory_training import rewards as r


def test_task_reward_is_the_share_of_right_answers() -> None:
    assert r.task_reward([True, False, True, True]) == 0.75
    with pytest.raises(DataError, match="without questions"):
        r.task_reward([])


@pytest.mark.parametrize(
    ("increment", "penalty"), [(-80, 0), (0, 0), (150, 0), (151, 0.004), (275, 0.5), (399, 0.996), (400, 1), (900, 1)]
)
def test_core_penalty_at_every_boundary(increment: int, penalty: float) -> None:
    assert r.core_length_penalty(increment) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("written", "expert", "penalty"),
    [
        (1200, 1000, 0),  # δ reached, ratio 1.2 within the tolerance
        (1301, 1000, 1 / 700),
        (1650, 1000, 0.5),
        (2000, 1000, 1),  # both forms of Eq. 8 give 1 here
        (499, 1000, 1 / 300),
        (200, 1000, 1),
        (299, 100, 0),  # a large ratio, but below δ
        (0, 199, 0),
        (0, 200, 1),
        (199, 0, 0),  # the expert wrote nothing
        (200, 0, 1),
    ],
)
def test_length_penalty_at_every_boundary(written: int, expert: int, penalty: float) -> None:
    assert r.length_penalty(written, expert) == pytest.approx(penalty)


def test_role_reward() -> None:
    assert r.role_reward(True, 0.6, 0.5) == pytest.approx(0.36)
    assert r.role_reward(True, 0.6, 0.0) == 0.6
    assert r.role_reward(False, 1.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("retrieved", "chosen"),
    [
        ([], None),
        (["core", "core"], None),
        (["procedural"], "procedural"),
        (["procedural", "semantic", "semantic", "core", "core", "core"], "semantic"),
        (["procedural", "semantic"], "semantic"),
        (["procedural", "semantic", "episodic"], "episodic"),
    ],
)
def test_the_dominant_role_is_amplified(retrieved: list[str], chosen: str | None) -> None:
    assert r.dominant(retrieved) == chosen
    assert r.attribution(retrieved, 4.0) == {role: 4.0 if role == chosen else 1.0 for role in r.ROLES}


def test_response_reward() -> None:
    assert r.response_reward(1.0, 1.0) == pytest.approx(1.45)
    assert r.response_reward(0.0, 1.0) == 0.0
    assert r.response_reward(0.5, 0.4) == pytest.approx(0.59)
    assert r.response_reward(0.5, None) == 0.5


def test_memory_reward() -> None:
    assert r.memory_reward(1.0, 0.0, True) == pytest.approx(0.3)
    assert r.memory_reward(0.0, 0.0, True) == pytest.approx(-0.5)
    # the paper's own bank: γ = .939 · .804
    assert r.memory_reward(0.939, 0.196, True) == pytest.approx(0.10396, abs=1e-5)
    assert r.memory_reward(0.5, 0.2, True, penalty=0.9, bonus=0.3) == pytest.approx(-0.54 + 0.12)


def test_an_empty_bank_is_worth_least_where_something_was_to_be_kept() -> None:
    assert r.memory_reward(None, None, True) == -0.5
    assert r.memory_reward(None, None, False) == 0.0
    # the printed instructions prefer it to every other bank
    assert r.memory_reward(None, None, True, e2_literal=True) == 0.3
    with pytest.raises(DataError, match="or neither"):
        r.memory_reward(0.5, None, True)


@pytest.mark.parametrize(
    ("flagged", "gold", "quality"),
    [
        (["t1"], None, None),
        ([], [], 1.0),
        ([], ["t1"], 0.0),
        (["t1"], [], 0.0),
        (["t1", "t2"], ["t1"], 0.8),
        (["t1"], ["t1", "t2"], 0.7),
        (["t1", "t1"], ["t1"], 1.0),
    ],
)
def test_filter_quality_weighs_recall_more(flagged: list[str], gold: list[str] | None, quality: float | None) -> None:
    assert r.filter_quality(flagged, gold) == (None if quality is None else pytest.approx(quality))


def test_utilization_reward() -> None:
    assert r.utilization_reward(1.0, 1.0) == pytest.approx(0.25)
    assert r.utilization_reward(0.5, None) == pytest.approx(0.075)


def test_banks_are_compared_by_store_and_text() -> None:
    one = [("fact", "Has a  Dog"), ("preference", "likes tea")]
    assert r.bank_similarity(one, [("fact", "has a dog")]) == 0.5
    assert r.bank_similarity(one, [("preference", "has a dog")]) == 0.0
    assert r.bank_similarity([], []) == 1.0


def test_pairs_take_the_widest_gap_that_is_allowed() -> None:
    scores = [0.1, 0.3, math.nan, -0.2]
    assert r.contrastive_pair("booster", scores) == r.Pair("booster", 1, 3, pytest.approx(0.5))
    narrowed = r.contrastive_pair("booster", scores, lambda _, worse: worse != 3)
    assert narrowed == r.Pair("booster", 1, 0, pytest.approx(0.2))
    assert r.contrastive_pair("booster", [0.3, 0.3]) is None
    assert r.contrastive_pair("booster", scores, lambda *_: False) is None
