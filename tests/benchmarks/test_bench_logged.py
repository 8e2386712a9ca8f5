"""The benchmark of banks of operations runs, and counts what it ingests."""

from __future__ import annotations

import pytest

from benchmarks.bench_logged import BenchLoggedConfig, made_up, measured


@pytest.mark.parametrize("system", ["membuilder", "salimory"])
def test_small_run(system: str) -> None:
    one = measured(system, BenchLoggedConfig(sessions=4, turns=6))
    assert one["rejected"] == 0
    assert one["operations"] > 4
    assert 0 < one["encoding"] < one["processor"]


def test_sessions_come_in_the_order_of_time() -> None:
    told = list(made_up(BenchLoggedConfig(sessions=800, turns=2)))
    days = [session.time or "" for session in told]
    assert days == sorted(set(days))
    assert len({turn.id for session in told for turn in session.turns}) == 1600
    assert told == list(made_up(BenchLoggedConfig(sessions=800, turns=2)))
