"""The collapse guard: what it takes for a collapse, and what a run then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.config import GuardConfig
from remind.alignment.guard import Guard
from remind.alignment.metrics import read_metrics
from remind.alignment.trainer import Trainer, train
from remind.core.errors import ModelError


def row(ce: tuple[float, float, float], entropy: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> dict[str, float]:
    return {f"ce{k}": v for k, v in enumerate(ce)} | {f"entropy{k}": v for k, v in enumerate(entropy)}


def test_what_is_a_collapse() -> None:
    guard = Guard(GuardConfig())
    # the rise counts from the lowest, not from an untrained start
    for ce in (7.0, 3.0, 0.5):
        assert guard.collapses(row((ce, ce, ce), (ce, ce, ce))) == []
    assert guard.collapses(row((0.5, 0.5, 1.29), (0.5, 0.5, 0.5))) == []
    (what,) = guard.collapses(row((0.5, 0.5, 1.31), (0.5, 0.5, 0.5)))
    assert what == "cross-entropy under x2 has risen from 0.500 to 1.310"
    assert guard.collapses(row((0.5, float("nan"), 0.5)))
    # sharper without being righter
    guard = Guard(GuardConfig())
    guard.collapses(row((2.0, 2.0, 2.0), (3.0, 3.0, 3.0)))
    assert guard.collapses(row((1.9, 1.9, 1.9), (0.1, 0.1, 0.1))) == []
    (what,) = guard.collapses(row((1.9, 2.1, 1.9), (0.1, 0.1, 0.1)))
    assert "entropy under x1" in what
    guard = Guard(GuardConfig(mode="off"))
    guard.collapses(row((0.1, 0.1, 0.1)))
    assert guard.collapses(row((9.0, 9.0, 9.0))) == []


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out cross-entropy under x1 rises by 0.5 nats with each training step."""
    through = Trainer.run_passes
    steps = 0

    def worse(self: Trainer, *args: Any) -> dict[str, Tensor]:
        nonlocal steps
        values = through(self, *args)
        if len(args) > 3:
            steps += 1
        else:
            values["ce1"] = torch.full_like(values["ce1"], 0.31 + 0.5 * steps)
        return values

    monkeypatch.setattr(Trainer, "run_passes", worse)


@pytest.mark.usefixtures("drifting")
def test_warn_says_it_once_per_measurement_and_goes_on(
    runs: Any, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = train(runs.config(states, tmp_path / "r", max_steps=4))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: collapse")]
    assert len(lines) == 2
    assert "at step 2: cross-entropy under x1 has risen from 0.310 to 1.310" in lines[0]
    assert "hard_levels" in lines[0]
    records = [row for row in read_metrics(out) if row["kind"] == "guard"]
    assert [record["step"] for record in records] == [2, 4]


# the last is sure of answers in another form
@pytest.mark.parametrize(
    ("ce", "entropy", "mode", "warned"),
    [(7.6, 8.0, "warn", 1), (7.6, 8.0, "off", 0), (5.9, 8.0, "warn", 0), (16.8, 1.1, "warn", 0)],
)
def test_a_model_that_does_not_know_the_language_is_named_once(
    runs: Any,
    states: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ce: float,
    entropy: float,
    mode: Any,
    warned: int,
) -> None:
    through = Trainer._held_out

    def set_to(self: Trainer) -> dict[str, Tensor]:
        values = through(self)
        assert values is not None
        return values | {name: torch.full_like(values[name], to) for name, to in (("ce0", ce), ("entropy0", entropy))}

    monkeypatch.setattr(Trainer, "_held_out", set_to)
    train(runs.config(states, tmp_path / "r", max_steps=2, guard=GuardConfig(mode=mode)))
    lines = [line for line in capsys.readouterr().err.splitlines() if " guesses: " in line]
    assert len(lines) == warned
    assert all(f"held-out loss is {ce} nats per token, its entropy {entropy}" in line for line in lines)


@pytest.mark.usefixtures("drifting")
def test_stop_saves_and_can_be_overruled(runs: Any, states: Path, tmp_path: Path) -> None:
    cfg = runs.config(states, tmp_path / "r", max_steps=4, guard=GuardConfig(mode="stop"), save_every=100)
    with pytest.raises(ModelError, match=r"collapse .* step 2: .*teacher_weights ema or base.*guard\.mode warn"):
        train(cfg)
    state = checkpoint.read_state(checkpoint.folder_of(tmp_path / "r", 2))
    assert state["guard"]["lowest"]["ce1"] == pytest.approx(0.31)
    # what it compares with comes back: against its own first measurement step 4 would look harmless
    with pytest.raises(ModelError, match="step 4"):
        train(replace(cfg, resume=True))
    train(replace(cfg, resume=True, trainer=replace(cfg.trainer, guard=GuardConfig(mode="warn"))))
