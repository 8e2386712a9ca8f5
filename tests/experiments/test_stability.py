"""The stability map: which points it has, what it calls the best, and a tiny map from end to end."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.stability import StabilityConfig, best, points, render
from remind.core.errors import ConfigError


def test_points_are_all_combinations_that_can_be_trained() -> None:
    cfg = StabilityConfig("m", "o", lr=(1e-4, 1e-3), tau=(1.0, 2.0))
    found = points(cfg)
    # live with and without gradients for teachers, ema, base; two rates, temperatures and kinds of hard levels
    assert len(found) == len(set(found)) == (2 + 1 + 1) * 2 * 2 * 2
    for knobs in found:
        assert knobs.target_grad == "detach" or knobs.teacher_weights == "live"
        assert knobs.edges == (((0, 1), (0, 2)) if knobs.teacher_weights == "base" else ((0, 1), (1, 2)))
    with pytest.raises(ConfigError, match="nothing to map"):
        StabilityConfig("m", "o", teachers=("ema",), target_grad=("flow",))


def test_the_best_setting_never_collapsed() -> None:
    setting = {"tau": 1.0, "teacher_weights": "base", "target_grad": "detach", "hard_levels": (0,), "runs": 2}
    rows: list[dict[str, Any]] = [
        {
            **setting,
            "guard": 0,
            "runs": 2,
            "lr": lr,
            "accuracy": {"x0": x0, "x1": 0.9, "x2": 1.0},
            "collapsed": collapsed,
        }
        for lr, x0, collapsed in ((1e-3, 0.9, 1), (5e-4, 0.8, 0), (1e-3, 0.7, 0))
    ]
    assert best(rows) is rows[1]
    assert best(rows[:1]) is None
    results = {"base": {"x0": 0.4, "x1": 0.8, "x2": 1.0}, "condition": "clean", "steps": 3, "seeds": [1], "rows": rows}
    text = render(results)
    assert "Best without a collapse: base, detach, hard 0, τ 1, lr 0.0005." in text
    assert "| 90.0 | 90.0 | 100.0 | 1 of 2 | 0 of 2 |" in text
