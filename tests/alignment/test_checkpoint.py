"""Checkpoints: the bits of a run that never stopped, what is refused, and runs that end early."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from remind.alignment import CollapseGuard
from remind.alignment.config import Edge, LoraConfig, Objective
from remind.alignment.metrics import checkpoints
from remind.alignment.step import AlignmentModel
from remind.core.errors import ConfigError, ModelError
from remind.core.run_folder import RunFolder
from remind.train_pra.config import DataConfig
from remind.train_pra.run import make_trainer, train

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "ema": {"objective": Objective(teacher_model_kind="ema"), "lora": LoraConfig(r=2, alpha=4)},
    "base": {"objective": Objective(teacher_model_kind="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))},
    "on_policy": {"data": DataConfig(targets="on_policy", max_decoded=4, refresh_steps=4, temperature=1.0)},
}


def copied(run: Path, out: Path, *steps: int) -> Path:
    """As a kill leaves a run that has saved at these steps: metrics go further, and end in half a line."""
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", out / f"checkpoint-{step}")
    shutil.copy(run / "config.yaml", out)
    (out / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"step": 7, "ki')
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_runs_are_the_same(runs: Any, run: Path, states: Path, tmp_path: Path, kind: str, capsys: Any) -> None:
    cfg = runs.config(states, tmp_path / "whole", save_steps=1, save_total_limit=None, **KINDS[kind])
    whole = run if kind == "full" else train(cfg)
    out = copied(whole, tmp_path / "r", 2, 3, 4)
    state = out / "checkpoint-4" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:-20])
    train(replace(cfg, out=str(out), resume=True))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is removed" in line]
    assert line.startswith(f"warning: {out / 'checkpoint-4'} ")
    runs.assert_same_runs(out, whole)


def test_what_cannot_be_gone_on_with_is_refused_in_a_line(
    runs: Any, run: Path, states: Path, tmp_path: Path, make_record: Any, make_states: Any
) -> None:
    out = copied(run, tmp_path / "r", 3)
    before = (out / "metrics.jsonl").read_text()

    def refused(message: str, loop: Any = None, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$"):
            train(replace(runs.config(states, out, resume=True, **(loop or {})), **changes))

    others = make_states(tmp_path / "s", [make_record(n) for n in (0, 1, 2, 3, 4, 7)])
    refused("already holds a run", resume=False)
    refused(r"other settings \(learning_rate, tau\)", {"learning_rate": 0.5}, objective=Objective(tau=1.0))
    refused(r"settings \(max_steps\); [^\n]* constant rate", {"max_steps": 9})
    refused(r"other settings \(training examples\)", states=str(others))
    refused(r"other settings \(base model\)", model="nano")
    trainer = make_trainer(runs.config(states, out, resume=True))
    with pytest.raises(ConfigError, match="already holds a run; choose another output_dir"):
        trainer.train()
    with RunFolder(out).held(), pytest.raises(ConfigError, match=f"another process is at work in {out}"):
        trainer.train(resume_from_checkpoint=True)
    assert (out / "metrics.jsonl").read_text() == before
    # a file of it is damaged
    (out / "checkpoint-3" / "optimizer.pt").write_bytes(b"no")
    with pytest.raises(ModelError, match=r"^[^\n]*checkpoint-3: a file of it cannot be read[^\n]*$"):
        trainer.train(resume_from_checkpoint=True)


class Measured(TrainerCallback):
    """Held-out losses as they are told, by step."""

    def __init__(self, name: str, *values: float) -> None:
        self.name, self.values = name, values

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # before it is compared, by the trainer's own callbacks and by transformers
        kwargs["metrics"][self.name] = self.values[state.global_step]


def test_the_newest_and_the_best_are_kept(runs: Any, states: Path, tmp_path: Path) -> None:
    cfg = runs.config(states, tmp_path / "r", eval_steps=1, save_steps=1, save_total_limit=2)
    trainer = make_trainer(cfg, Measured("eval_ce0", 9.0, 8.0, 1.0, 3.0, 2.0, 5.0, 4.0))
    trainer.train()
    assert [folder.name for folder in checkpoints(tmp_path / "r")] == [f"checkpoint-{n}" for n in (2, 6)]
    assert trainer.state.best_global_step == 2


@pytest.mark.parametrize(
    ("measured", "collapses"),
    [
        # the rise counts from the lowest, not from an untrained start
        ([(7.0, 7.0), (0.5, 0.5), (1.29, 0.5)], False),
        ([(7.0, 7.0), (0.5, 0.5), (1.31, 0.5)], True),
        ([(0.5, 0.5), (float("nan"), 0.5)], True),
        # sharper, and righter or not
        ([(2.0, 3.0), (1.9, 0.1)], False),
        ([(2.0, 3.0), (2.1, 0.1)], True),
    ],
)
def test_what_is_a_collapse(measured: list[tuple[float, float]], collapses: bool) -> None:
    guard = CollapseGuard()
    found = [guard.collapses({"ce0": ce, "entropy0": entropy}) for ce, entropy in measured]
    assert [bool(what) for what in found] == [*[False] * (len(measured) - 1), collapses]


def test_a_collapse_is_warned_of_or_ends_the_run(runs: Any, states: Path, tmp_path: Path, capsys: Any) -> None:
    drifts = Measured("eval_ce1", *(0.31 + 0.5 * step for step in range(5)))
    cfg = runs.config(states, tmp_path / "r", max_steps=4, guard="stop", save_steps=100)
    with pytest.raises(ModelError, match=r"^collapse .* step 2: .*teacher_model_kind ema or base.*guard warn"):
        train(cfg, drifts)
    # what it compares with comes back: against its own first measurement step 4 would look harmless
    with pytest.raises(ModelError, match="step 4"):
        train(replace(cfg, resume=True), drifts)
    capsys.readouterr()
    train(replace(cfg, out=str(tmp_path / "w"), trainer=replace(cfg.trainer, guard="warn")), drifts)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: collapse")]
    assert [line.split(": ")[1] for line in lines] == [f"collapse on held-out questions at step {n}" for n in (2, 4)]
    assert [row["step"] for row in runs.timeless(tmp_path / "w", "guard")] == [2, 4]


def test_out_of_memory_names_sizes_and_remedies(runs: Any, states: Path, tmp_path: Path, monkeypatch: Any) -> None:
    forward = AlignmentModel.forward

    def full(self: AlignmentModel, batch: Any, levels: Any, *args: Any, **kwargs: Any) -> Any:
        # with one of the passes of a microbatch gone, some gradients are there already
        if trainer.state.global_step == 3 and torch.is_grad_enabled() and 0 in levels:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return forward(self, batch, levels, *args, **kwargs)

    cfg = runs.config(states, tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(AlignmentModel, "forward", full)
        trainer = make_trainer(cfg)
        with pytest.raises(ModelError, match=r"^out of memory in step 4, [^\n]*$") as raised:
            trainer.train()
    for item in (trainer.train_dataset.items[place] for place in trainer._order.batch(3)):
        lengths = "/".join(str(len(prompt) + len(item.answer)) for prompt in item.prompts)
        assert f"{item.id} ({lengths})" in str(raised.value)
