"""The collapse guard: what it takes for a collapse, and what a run then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_utils import EvalLoopOutput

from remind.alignment import CollapseGuard, PRATrainer
from remind.alignment.metrics import kept, read_metrics
from remind.core.errors import ModelError
from remind.train_pra.run import make_trainer, train


def row(ce: tuple[float, float, float], entropy: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> dict[str, float]:
    return {f"ce{k}": v for k, v in enumerate(ce)} | {f"entropy{k}": v for k, v in enumerate(entropy)}


def test_what_is_a_collapse() -> None:
    guard = CollapseGuard()
    # the rise counts from the lowest, not from an untrained start
    for ce in (7.0, 3.0, 0.5):
        assert guard.collapses(row((ce, ce, ce), (ce, ce, ce))) == []
    assert guard.collapses(row((0.5, 0.5, 1.29), (0.5, 0.5, 0.5))) == []
    (what,) = guard.collapses(row((0.5, 0.5, 1.31), (0.5, 0.5, 0.5)))
    assert what == "cross-entropy under x2 has risen from 0.500 to 1.310"
    assert guard.collapses(row((0.5, float("nan"), 0.5)))
    # sharper without being righter
    guard = CollapseGuard()
    guard.collapses(row((2.0, 2.0, 2.0), (3.0, 3.0, 3.0)))
    assert guard.collapses(row((1.9, 1.9, 1.9), (0.1, 0.1, 0.1))) == []
    (what,) = guard.collapses(row((1.9, 2.1, 1.9), (0.1, 0.1, 0.1)))
    assert "entropy under x1" in what


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets figures of the held-out loss by step."""
    through = PRATrainer.evaluation_loop

    def put(figures: Any) -> None:
        def loop(self: PRATrainer, *args: Any, **kwargs: Any) -> EvalLoopOutput:
            found = through(self, *args, **kwargs)
            assert found.metrics is not None
            found.metrics.update({f"eval_{k}": v for k, v in figures(self.state.global_step).items()})
            return found

        monkeypatch.setattr(PRATrainer, "evaluation_loop", loop)

    return put


def drifting(step: int) -> dict[str, float]:
    """Cross-entropy under x1 rises by 0.5 nats with each training step."""
    return {"ce1": 0.31 + 0.5 * step}


def test_warn_says_it_once_per_measurement_and_goes_on(
    runs: Any, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    measured(drifting)
    out = train(runs.config(states, tmp_path / "r", max_steps=4))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: collapse")]
    assert len(lines) == 2
    assert "at step 2: cross-entropy under x1 has risen from 0.310 to 1.310" in lines[0]
    assert "hard_levels" in lines[0]
    assert [line["step"] for line in read_metrics(out) if line["kind"] == "guard"] == [2, 4]


# the last is sure of answers in another form


def test_stop_saves_and_can_be_overruled(runs: Any, states: Path, tmp_path: Path, measured: Any) -> None:
    measured(drifting)
    cfg = runs.config(states, tmp_path / "r", max_steps=4, guard="stop", save_steps=100)
    with pytest.raises(ModelError, match=r"^collapse .* step 2: .*teacher_model_kind ema or base.*guard warn"):
        train(cfg)
    assert kept(tmp_path / "r" / "checkpoint-2")
    # what it compares with comes back: against its own first measurement step 4 would look harmless
    again = make_trainer(replace(cfg, resume=True))
    with pytest.raises(ModelError, match="step 4"):
        again.train(resume_from_checkpoint=True)
    assert again.guard.lowest["ce1"] == pytest.approx(0.31)
    train(replace(cfg, resume=True, trainer=replace(cfg.trainer, guard="warn")))
