"""Rewards of MemBuilder and SaliMory against numbers worked out by hand from the equations."""

from __future__ import annotations

import pytest

from remind.memory_training import rewards as r


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
