"""What runs cost and what they come to: against counts by hand, a loop and simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.proof.arms import RECOMMENDED
from experiments.proof.conditions import named
from experiments.proof.flops import Size, fixed_cost, step_cost
from experiments.proof.plan import equal_steps
from experiments.proof.statistics import draws, estimate, resampled_means, share_of, stretch
from experiments.proof.store import collapsed
from experiments.proof.table import Comparison
from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.step import plan

# FLOPs


def _example(*lengths: int, answer: int, labelled: bool = True, common: int = 0) -> Example:
    prompts = [torch.arange(length, dtype=torch.int32) for length in lengths]
    prompts[2][common:] += 1000
    return Example("q", tuple(prompts), torch.zeros(answer, dtype=torch.int32), labelled)


def test_flops_against_a_count_by_hand() -> None:
    size = Size(body=10, head=3)
    one = _example(20, 25, 30, answer=4, common=22)
    # 23, 28, 33 tokens with the answer but for its last one; 4 answer positions
    sft = Objective(lambda_hard=1.0, edges=())
    assert step_cost([one], sft, plan(sft), size) == 6 * (23 * 10 + 4 * 3)
    mixed = Objective(lambda_hard=1.0, edges=(), hard_levels=(0, 1, 2))
    assert step_cost([one, one], mixed, plan(mixed), size) == 2 * 6 * ((23 + 28 + 33) * 10 + 3 * 4 * 3)
    printed = Objective()
    naive = 6 * ((23 + 28) * 10 + 2 * 4 * 3) + 2 * (33 * 10 + 4 * 3)
    assert step_cost([one], printed, plan(printed), size) == naive
    # with the prefix shared x2 runs only what comes after the 22 tokens
    assert step_cost([one], printed, plan(printed, prefix_sharing=True), size) == naive - 2 * 22 * 10
    flow = Objective(target_grad="flow")
    assert step_cost([one], flow, plan(flow), size) == 6 * ((23 + 28 + 33) * 10 + 3 * 4 * 3)
    base = RECOMMENDED.objective
    assert step_cost([one], base, plan(base), size) == 6 * (23 * 10 + 4 * 3)
    assert fixed_cost([one, one], base, size) == 2 * 2 * ((28 + 33) * 10 + 2 * 4 * 3)
    bare = replace(one, labelled=False)
    assert fixed_cost([bare], base, size) - fixed_cost([one], base, size) == 2 * (33 * 10 + 4 * 3)
    ema = Objective(teacher_model_kind="ema")
    passes = 8 * ((23 + 28) * 10 + 2 * 4 * 3) - 2 * (23 * 10 + 4 * 3) + 2 * (33 * 10 + 4 * 3)
    assert step_cost([one], ema, plan(ema), size) == passes
    assert equal_steps({"flops": 300.0, "steps": 3}, {"flops": 749.0, "steps": 3}) == 7


# statistics


def _loop(values: Any, dialogues: list[str], resamples: int) -> list[float]:
    """The definition, number by number."""
    names = list(dict.fromkeys(dialogues))
    seeds, n = values.shape
    grand = values.mean()
    of_seed = [values[s].mean() - grand for s in range(seeds)]
    places = {name: [q for q in range(n) if dialogues[q] == name] for name in names}
    of_dialogue = {name: values[:, places[name]].mean() - grand for name in names}
    wide = values.astype(float).copy()
    for s in range(seeds):
        for q in range(n):
            wide[s, q] += (stretch(seeds) - 1) * of_seed[s] + (stretch(len(names)) - 1) * of_dialogue[dialogues[q]]
    found = []
    for drawn_seeds, drawn_dialogues in zip(*draws(seeds, len(names), resamples), strict=True):
        pool = [
            wide[s, q]
            for s in range(seeds)
            for _ in range(int(drawn_seeds[s]))
            for place, name in enumerate(names)
            for _ in range(int(drawn_dialogues[place]))
            for q in places[name]
        ]
        found.append(sum(pool) / len(pool))
    return found


def test_bootstrap_against_a_loop() -> None:
    rng = np.random.default_rng(4)
    dialogues = ["a"] * 3 + ["b"] * 5 + ["c"] * 2 + ["d"]
    values = rng.integers(-1, 2, (4, len(dialogues))).astype(float)
    expected = _loop(values, dialogues, 200)
    np.testing.assert_allclose(resampled_means(values, dialogues, 200), expected, atol=1e-12)
    interval = estimate(values, dialogues, 200)
    assert (interval["low"], interval["high"]) == pytest.approx(tuple(np.percentile(expected, [2.5, 97.5])))
    assert interval["value"] == pytest.approx(values.mean())
    np.testing.assert_allclose(resampled_means(values[:1], dialogues, 50), _loop(values[:1], dialogues, 50), atol=1e-12)


@pytest.mark.parametrize(("of_seeds", "of_dialogues"), [(0.1, 0.0), (0.06, 0.06)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(of_seeds: float, of_dialogues: float) -> None:
    rng = np.random.default_rng(8)
    dialogues = [f"d{place}" for place in range(12) for _ in range(10)]
    held, rounds = 0, 250
    for _ in range(rounds):
        shares = 0.5 + of_seeds * rng.standard_normal((5, 1)) + of_dialogues * np.repeat(rng.standard_normal(12), 10)
        values = (rng.random((5, 120)) < shares).astype(float)
        interval = estimate(values, dialogues, 500)
        held += interval["low"] <= 0.5 <= interval["high"]
    # 250 rounds: a true .95 falls below .91 once in two hundred times
    assert held / rounds >= 0.91


def test_share_of_the_gap() -> None:
    dialogues = ["a", "a", "b", "b"]
    ours, low, high = np.array([[1.0, 1, 1, 0]]), np.array([[0.0, 1, 0, 0]]), np.ones((1, 4))
    share = share_of(ours - low, high - low, dialogues, 300)
    assert share is not None
    assert share["value"] == pytest.approx(2 / 3)
    assert share["low"] < 2 / 3 < share["high"]
    assert share_of(ours, low - low, dialogues, 300) is None


def _run(x0: str, x1: str = "1111", x2: str = "1111", **values: Any) -> dict[str, Any]:
    base = {"guard": [], "stopped": None, "steps": 2, "flops": 1.0, "seconds": {"all": 1.0}}
    return {**base, "right": {"x0": x0, "x1": x1, "x2": x2}, **values}


def test_collapse_is_told_by_x1_x2_or_the_guard() -> None:
    base = _run("0000", "1110", "1111")
    fired = {"guard": [{"step": 1, "what": ["x"]}]}
    for run, expected in (
        (_run("0000", "1110", "1111"), False),
        (_run("1111", "1100", "1111"), True),
        (_run("1111", "1111", "1011"), True),
        (_run("1111", **fired), True),
        (_run("1111", "11", "11"), False),  # the first two questions alone
    ):
        assert collapsed(run, base) == expected


def test_without_labels_the_rival_is_the_best_of_scarce_labels() -> None:
    found = {
        ("sft", "scarce-30"): {1: _run("1000"), 2: _run("1000")},
        ("sft_flops", "scarce-60"): {1: _run("1100"), 2: _run("1000")},
        ("sft", "scarce-60-pool"): {1: _run("1111"), 2: _run("1111")},
        ("pra_recommended", "none"): {1: _run("1110"), 2: _run("1110")},
    }
    comparison = Comparison(_run("0000"), ["a", "a", "b", "b"], 200)
    against = comparison.row(found, "pra_recommended", named("none"))["against"]
    assert set(against) == {"base", "sft_flops"}
    assert against["sft_flops"]["learned_under"] == "scarce-60"
    assert against["sft_flops"]["value"] == pytest.approx(0.75 - 3 / 8)
