"""Selection against a plain reading of the rules."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from remind.grounding import select_blocks


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    n = draw(st.integers(0, 12))
    salience = [draw(st.sampled_from([0.0, 0.5, 1.0, -2.0, -math.inf]) | st.floats(-3, 3)) for _ in range(n)]
    runs = [0] * n
    for k in range(1, n):
        runs[k] = runs[k - 1] + draw(st.sampled_from([0, 0, 0, 1]))
    return salience, [draw(st.integers(0, 30)) for _ in range(n)], runs


def reachable(k: int, window: int, runs: list[int]) -> set[int]:
    return {n for n in range(len(runs)) if abs(n - k) <= window and len(set(runs[min(n, k) : max(n, k) + 1])) == 1}


def blocks_of(chosen: set[int], runs: list[int]) -> list[tuple[int, int]]:
    blocks: list[tuple[int, int]] = []
    for k in sorted(chosen):
        if blocks and blocks[-1][1] == k - 1 and runs[k] == runs[k - 1]:
            blocks[-1] = (blocks[-1][0], k)
        else:
            blocks.append((k, k))
    return blocks


@given(turns(), st.integers(0, 120), st.integers(0, 3), st.booleans())
def test_budget(case: tuple[list[float], list[int], list[int]], budget: int, window: int, with_runs: bool) -> None:
    salience, lengths, runs = case
    if not with_runs:
        runs = [0] * len(runs)
    chosen: set[int] = set()
    left = set(range(len(salience)))
    while left:
        best = max(left, key=lambda k: (salience[k], -k))
        left.remove(best)
        if salience[best] == -math.inf:
            break
        grown = chosen | reachable(best, window, runs)
        if sum(lengths[k] for k in grown) > budget:
            break
        chosen = grown
    got = select_blocks(salience, lengths, budget=budget, window=window, run=runs if with_runs else None)
    assert got == blocks_of(chosen, runs)


@given(turns(), st.floats(-3, 3), st.integers(0, 3))
def test_threshold(case: tuple[list[float], list[int], list[int]], threshold: float, window: int) -> None:
    salience, lengths, runs = case
    chosen = set().union(*(reachable(k, window, runs) for k, s in enumerate(salience) if s > threshold))
    assert select_blocks(salience, lengths, threshold=threshold, window=window, run=runs) == blocks_of(chosen, runs)
