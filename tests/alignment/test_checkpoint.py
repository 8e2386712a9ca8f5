"""Checkpoints: stock names, never read half-written, and the bits of a run that never stopped."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from remind.alignment.config import Edge, LoraConfig, Objective
from remind.alignment.metrics import checkpoints, kept, newest
from remind.core.errors import ConfigError
from remind.core.run_folder import RunFolder
from remind.train_pra.config import DataConfig
from remind.train_pra.run import make_trainer, train

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraConfig(r=2, alpha=4)},
    "ema": {"objective": Objective(teacher_model_kind="ema")},
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


@pytest.fixture(scope="module")
def saved(runs: Any, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All six steps are kept."""
    out = tmp_path_factory.mktemp("saved") / "run"
    return train(runs.config(states, out, save_steps=1, save_total_limit=None))


def test_files_have_the_names_of_transformers_and_the_state_is_last(saved: Path) -> None:
    assert [folder.name for folder in checkpoints(saved)] == [f"checkpoint-{n}" for n in range(1, 7)]
    written = {path.name: path.stat().st_mtime_ns for path in (saved / "checkpoint-3").iterdir()}
    stock = {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "tokenizer.json"}
    assert stock < written.keys()
    last = written.pop("trainer_state.json")
    assert all(time <= last for time in written.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(
    runs: Any, saved: Path, states: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = runs.config(states, tmp_path / "whole", save_steps=1, save_total_limit=None, **KINDS[kind])
    whole = saved if kind == "full" else train(cfg)
    out = copied(whole, tmp_path / "r", 2, 3, 4)
    state = out / "checkpoint-4" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:-20])
    again = make_trainer(replace(cfg, out=str(out), resume=True))
    again.train(resume_from_checkpoint=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is removed" in line]
    assert line.startswith(f"warning: {out / 'checkpoint-4'} ")
    runs.assert_same_runs(out, whole)
    last = kept(whole / "checkpoint-6")
    assert last is not None
    assert [again.guard.first, again.guard.lowest] == last["guard"]
    assert again.guard.first == {k: v for k, v in runs.timeless(whole)[0].items() if k in again.guard.first}


def test_a_run_goes_on_from_the_checkpoint_that_is_named(runs: Any, saved: Path, states: Path, tmp_path: Path) -> None:
    cfg = runs.config(states, tmp_path / "r", save_steps=1, save_total_limit=None)
    make_trainer(cfg).train(resume_from_checkpoint=str(saved / "checkpoint-5"))
    runs.assert_identical(runs.weights(tmp_path / "r"), runs.weights(saved))


def test_what_cannot_be_gone_on_with_is_refused_in_a_line(
    runs: Any, saved: Path, states: Path, tmp_path: Path, make_record: Any, make_states: Any
) -> None:
    out = copied(saved, tmp_path / "r", 3)
    cfg = runs.config(states, out, resume=True)
    others = make_states(tmp_path / "s", [make_record(n) for n in (0, 1, 2, 3, 4, 7)])
    before = (out / "metrics.jsonl").read_text()

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$"):
            train(replace(runs.config(states, out, resume=True, **changes.pop("loop", {})), **changes))

    refused("already holds a run", resume=False)
    settings = {"loop": {"learning_rate": 0.5}, "objective": Objective(tau=1.0)}
    refused(r"other settings \(learning_rate, tau\)", **settings)
    refused(r"other settings \(training examples\)", states=str(others))
    refused(r"other settings \(base model\)", model="nano")
    refused(r"other settings \(adapters\)", lora=LoraConfig(r=2))
    trainer = make_trainer(cfg)
    with pytest.raises(ConfigError, match="already holds a run; choose another output_dir"):
        trainer.train()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: not a checkpoint of PRATrainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "empty"))
    with RunFolder(out).held(), pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is at work in {out}"):
        trainer.train(resume_from_checkpoint=True)
    assert (out / "metrics.jsonl").read_text() == before
    assert newest(out) == out / "checkpoint-3"
    # checkpoints of another trainer look unfinished, and stay
    trainer.args.output_dir = str(tmp_path / "other")
    theirs = tmp_path / "other" / "checkpoint-9" / "trainer_state.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    with pytest.raises(ConfigError, match="other already holds a run"):
        trainer.train(resume_from_checkpoint=True)
    assert theirs.is_file()


class Measured(TrainerCallback):
    """Held-out losses as they are told."""

    def __init__(self, *ce0: float) -> None:
        self.ce0 = ce0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # before it is compared, by the trainer's own callbacks and by transformers
        kwargs["metrics"]["eval_ce0"] = self.ce0[state.global_step]


def test_the_newest_and_the_best_are_kept(runs: Any, states: Path, tmp_path: Path) -> None:
    cfg = runs.config(states, tmp_path / "r", eval_steps=1, save_steps=1, save_total_limit=2)
    trainer = make_trainer(cfg, Measured(9.0, 8.0, 1.0, 3.0, 2.0, 5.0, 4.0))
    trainer.train()
    assert [folder.name for folder in checkpoints(tmp_path / "r")] == [f"checkpoint-{n}" for n in (2, 6)]
    assert trainer.state.best_global_step == 2
