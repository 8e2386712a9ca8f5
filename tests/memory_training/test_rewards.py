"""Rewards of MemBuilder and SaliMory against numbers worked out by hand from the equations."""

from __future__ import annotations

import pytest

from remind.memory_training import rewards as r
from remind.memory_training.config import SaliMoryConfig


def test_penalties_at_every_boundary() -> None:
    for increment, penalty in ((-80, 0), (150, 0), (151, 0.004), (275, 0.5), (399, 0.996), (400, 1), (900, 1)):
        assert r.core_length_penalty(increment) == pytest.approx(penalty)
    # δ reached and a ratio within the tolerance; a large ratio, but below δ; the expert wrote nothing
    free = ((1200, 1000), (299, 100), (199, 0))
    assert [r.length_penalty(*one) for one in free] == [0, 0, 0]
    for (written, expert), penalty in (((1650, 1000), 0.5), ((499, 1000), 1 / 300), ((200, 1000), 1), ((200, 0), 1)):
        assert r.length_penalty(written, expert) == pytest.approx(penalty)


def test_the_dominant_role_is_amplified() -> None:
    for retrieved, chosen in (
        ("core core", None),
        ("procedural semantic semantic core core core", "semantic"),
        ("procedural semantic episodic", "episodic"),
    ):
        assert r.attribution(retrieved.split(), 4.0) == {role: 4.0 if role == chosen else 1.0 for role in r.ROLES}


def test_rewards_of_a_rollout() -> None:
    assert r.role_reward(True, 0.6, 0.5) == pytest.approx(0.36)
    assert r.role_reward(False, 1.0, 0.0) == 0.0
    assert (r.response_reward(1.0, 1.0), r.response_reward(0.5, None)) == (pytest.approx(1.45), 0.5)
    # the paper's own bank: γ = .939 · .804
    cfg = SaliMoryConfig()
    assert r.memory_reward(0.939, 0.196, True, cfg) == pytest.approx(0.10396, abs=1e-5)
    # an empty one is worth least where something was to be kept; the printed instructions prefer it to every other
    assert [r.memory_reward(None, None, salient, cfg) for salient in (True, False)] == [-0.5, 0.0]
    assert r.memory_reward(None, None, True, SaliMoryConfig(e2_literal=True)) == 0.3
    assert (r.filter_quality(["t1"], ["t1", "t2"]), r.filter_quality([], [])) == (pytest.approx(0.7), 1.0)
