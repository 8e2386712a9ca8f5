"""The benchmark of a step: what it counts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_pra_step import BenchStepConfig, build, make_step
from experiments.flops import executed


def test_matrix_products_are_counted_forward_back_and_again() -> None:
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 11, requires_grad=True)
    once = 2 * 5 * 7 * 11
    assert executed(lambda: x @ w) == once
    assert executed(lambda: (x @ w).sum().backward()) == 3 * once


@pytest.mark.parametrize(("tune", "bound"), [("full", 2.25), ("lora", 7 / 3)])
def test_operations_are_near_the_bounds(tune: str, bound: float) -> None:
    """9 of 4 passes over the layers in full fine-tuning, 7 of 3 with adapters; sharing leaves of x2 but its rest."""
    cfg = BenchStepConfig(arch="nano", tokens=256, answer=8, tune=(tune,))  # type: ignore[arg-type]
    model = build(cfg, cfg.tune[0])
    found = {}
    for name in ("sft", *cfg.variants):
        found[name] = executed(make_step(name, model, cfg))
        model.zero_grad()
    ratio = {name: value / found["sft"] for name, value in found.items()}
    assert bound - 0.02 < ratio["sequential"] < bound + 0.1
    assert 2.0 < ratio["shared"] < 2.12
    assert 1.0 <= ratio["base_topk"] <= ratio["base_hidden"] < 1.06
    assert ratio["naive"] > 3
    assert ratio["two_answers"] == pytest.approx(ratio["shared"] + 1, rel=1e-3)
    # eight questions of which each is read once, without layers computed again: 8 of 4 or of 3 passes, and few tokens
    assert 8 / 4 - 0.1 < ratio["answering"] < 8 / 3 + 0.3
