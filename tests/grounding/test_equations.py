"""Eq. 3 to 5 against sums in float64 as the paper has them, and selection against a plain reading of its rules."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.grounding import gaussian_smooth, guidance, select_blocks, token_resonance, turn_salience
from sae import SparseCodes

D_SAE = 12


def codes_of(rows: list[dict[int, float]], k: int = 4, dtype: torch.dtype = torch.float64) -> SparseCodes:
    """Codes from feature -> value; free entries get unused features with value 0."""
    indices, values = [], []
    for row in rows:
        free = [j for j in range(D_SAE) if j not in row][: k - len(row)]
        indices.append([*row, *free])
        values.append([*row.values(), *([0.0] * len(free))])
    return SparseCodes(
        torch.tensor(values, dtype=dtype).reshape(-1, k), torch.tensor(indices, dtype=torch.int64).reshape(-1, k)
    )


VALUES = st.floats(0.0, 10.0, allow_subnormal=False)
ROW = st.dictionaries(st.integers(0, D_SAE - 1), VALUES, max_size=4)
ROWS = st.lists(ROW, max_size=6)
VECTOR = st.lists(st.floats(0.0, 5.0), min_size=D_SAE, max_size=D_SAE)


def active(row: dict[int, float]) -> set[int]:
    return {j for j, value in row.items() if value > 0}


@given(ROWS, ROWS, VECTOR, st.floats(0, 10), st.booleans())
def test_guidance_is_eq_3(
    reason: list[dict[int, float]], anchors: list[dict[int, float]], idf: list[float], alpha: float, on_anchors: bool
) -> None:
    v = guidance(
        codes_of(reason), codes_of(anchors), torch.tensor(idf, dtype=torch.float64), alpha, anchor_idf=on_anchors
    )
    for j in range(D_SAE):
        from_reason = idf[j] * sum(j in active(row) for row in reason)
        from_anchors = alpha * sum(j in active(row) for row in anchors) * (idf[j] if on_anchors else 1.0)
        assert v[j].item() == pytest.approx(max(from_reason, from_anchors), rel=1e-12, abs=1e-12)


@given(st.data(), VECTOR, st.floats(0, 8), st.booleans())
def test_resonance_is_eq_4(data: st.DataObject, v: list[float], beta: float, with_runs: bool) -> None:
    n_turns = data.draw(st.integers(0, 5))
    speakers = [data.draw(st.lists(ROW, max_size=3)) for _ in range(n_turns)]
    rows = data.draw(ROWS)
    turns = [data.draw(st.integers(-1, n_turns - 1)) for _ in rows]
    runs = list(accumulate(data.draw(st.integers(0, 1)) for _ in speakers))
    spoken = [codes_of(one) for one in speakers]
    weights = torch.tensor(v, dtype=torch.float64)
    given_runs = runs if with_runs else None
    got = token_resonance(codes_of(rows), weights, torch.tensor(turns), spoken, beta, run=given_runs)
    for t, (row, turn) in enumerate(zip(rows, turns, strict=True)):
        expected = sum(v[j] * row[j] for j in active(row))
        for k, marker in enumerate(speakers):
            features = set().union(*(active(token) for token in marker))
            # t in T_k, or in T_{k-1} that T_k answers
            answered = turn >= 0 and turn == k - 1 and (not with_runs or runs[k] == runs[turn])
            if turn == k or answered:
                expected += beta * sum(v[j] for j in features)
        assert got[t].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-100, 100), max_size=40), st.floats(0.05, 6))
def test_smoothing_is_the_convolution(values: list[float], sigma: float) -> None:
    assert gaussian_smooth(r := torch.tensor(values), 0.0) is r
    radius = math.ceil(3 * sigma)
    kernel = {d: math.exp(-(d**2) / (2 * sigma**2)) for d in range(-radius, radius + 1)}
    total = sum(kernel.values())
    got = gaussian_smooth(torch.tensor(values, dtype=torch.float64), sigma)
    assert len(got) == len(values)
    for t in range(len(values)):
        expected = sum(kernel[d] * values[t + d] for d in kernel if 0 <= t + d < len(values)) / total
        assert got[t].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=200)
@given(st.data(), st.floats(0, 1), st.sampled_from(["mean", "max", "top1", "top3", "top100"]))
def test_salience_is_eq_5(data: st.DataObject, lam: float, agg: str) -> None:
    n_turns, size = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 25))
    s, turns, captions = (
        data.draw(st.lists(values, min_size=size, max_size=size))
        for values in (st.floats(-50, 50), st.integers(-1, n_turns - 1), st.booleans())
    )

    def agg_of(values: list[float]) -> float:
        m = {"mean": len(values), "max": 1}.get(agg) or int(agg[3:])
        largest = sorted(values, reverse=True)[:m]
        return sum(largest) / len(largest)

    got = turn_salience(
        torch.tensor(s, dtype=torch.float64), torch.tensor(turns), torch.tensor(captions), n_turns, lam, agg
    )
    assert got.shape == (n_turns,)
    for k in range(n_turns):
        text = [x for x, t, c in zip(s, turns, captions, strict=True) if t == k and not c]
        caption = [x for x, t, c in zip(s, turns, captions, strict=True) if t == k and c]
        if text and caption:
            expected = (1 - lam) * agg_of(text) + lam * agg_of(caption)
        elif text or caption:
            expected = agg_of(text or caption)
        else:
            expected = -math.inf
        assert got[k].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


# selection


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
