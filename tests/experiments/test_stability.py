"""The stability map: which points it has, what it calls the best, and a tiny map from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.proof.store import BenchConfig
from experiments.stability import StabilityConfig, best, points, render, stability
from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.models.nano import save_nano
from remind.testbed.world import WorldConfig


def test_points_are_all_combinations_that_can_be_trained() -> None:
    cfg = StabilityConfig("m", "o", lr=(1e-4, 1e-3), tau=(1.0, 2.0))
    found = points(cfg)
    # live with and without gradients for teachers, ema, base; two rates, temperatures and kinds of hard levels
    assert len(found) == len(set(found)) == (2 + 1 + 1) * 2 * 2 * 2
    for knobs in found:
        assert knobs.target_grad == "detach" or knobs.teacher_weights == "live"
        assert knobs.step == ("joint" if knobs.target_grad == "flow" else "sequential")
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


@pytest.mark.slow
def test_a_tiny_map_from_end_to_end(tmp_path: Path) -> None:
    model = save_nano(tmp_path / "model", hidden_size=16, layers=2, vision_size=16)
    world = WorldConfig(train=1, dev=1, test=1, sessions=2, evidence=(1, 1), contrary=(0, 1), second_voice=0.0)
    small = BenchConfig(world=world, batch=2, max_new_tokens=2, upper=2, watched=1, watch_every=0)
    values: dict[str, Any] = {"workers": 0, "steps": 1, "seeds": (4,), "lr": (1e-3,), "tau": (1.0,), "bench": small}
    out = stability(StabilityConfig(str(model), str(tmp_path / "out"), hard_levels=((0,),), **values))
    rows = read_json(out / "results.json")["rows"]
    kinds = [f"{row['teacher_weights']} {row['target_grad']}" for row in rows]
    assert kinds == ["live detach", "live flow", "ema detach", "base detach"]
    assert all(row["runs"] == 1 for row in rows)
    assert (out / "stability.png").stat().st_size > 10_000
    assert all(read_json(path)["spec"]["on"] == "dev" for path in (out / "runs").glob("*.json"))
