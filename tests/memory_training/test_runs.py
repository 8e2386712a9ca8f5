"""Runs of `remind train-memory`: in two processes as in one, killed anywhere with the same bits; what is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worded
from forked import Forked
from safetensors.torch import load_file
from worded import Words

from remind.core.cli import parse
from remind.core.errors import ConfigError, ModelError
from remind.memory_training import train, trainer
from remind.memory_training.config import MemoryWorldConfig, PolicyGradientConfig, RewardConfig, TrainMemoryConfig

SCRIPT = Path(worded.__file__)


def words(small: Path, out: Path, method: str) -> list[str]:
    said = f"--out {out} --method {method} --model {small} --lr 1e-2 --warmup 0 --steps 3 --batch_size 2"
    said += " --world.dialogues 2 --world.sessions 1 --world.evaluate 1 --save_every 1"
    return f"{said} --rl.group 2 --rl.reply_tokens 4 --rl.inner_epochs 2".split()


def here(small: Path, out: Path, method: str, **changes: Any) -> None:
    """A run in this process."""
    train.train_memory(replace(parse(TrainMemoryConfig, "", words(small, out, method)), **changes), Words)


def outcome(out: Path) -> tuple[object, ...]:
    """What a run comes to, less what tells time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timeless = [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]
    return timeless, (out / "report.json").read_text(), (out / "policy" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "adrpo"])
def test_two_processes_train_as_one_does(
    small: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, for the same replies: each process samples its own."""
    pair = Forked(SCRIPT, *words(small, tmp_path / "2", method), "--scripted", processes=2)
    monkeypatch.setattr(trainer, "complete", worded.scripted)
    here(small, tmp_path / "1", method)
    _, errors = pair.communicate(timeout=240)
    assert pair.returncode == 0, errors[-2000:]
    one, two = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("1", "2"))
    first = load_file(small / "model.safetensors")
    assert max(float((one[name] - first[name]).abs().max()) for name in one) > 1e-2
    # AdamW moves a weight whose gradient is no more than rounding by as much as any other: few have one
    assert max(float((one[name] - two[name]).abs().mean()) for name in one) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "adrpo"])
def test_runs_killed_at_random_end_with_the_same_bits(small: Path, tmp_path: Path, method: str) -> None:
    """SIGKILL anywhere: while it samples, scores, updates, writes a checkpoint or evaluates."""
    here(small, tmp_path / "whole", method)
    whole, out = outcome(tmp_path / "whole"), tmp_path / "out"
    log, draw, ends = out / "metrics.jsonl", random.Random(method), list[int]()
    while len(ends) < int(os.environ.get("REMIND_KILLS", "1")):
        written = log.stat().st_size if log.exists() else 0
        process = Forked(SCRIPT, *words(small, out, method), "--resume", "true")
        while process.poll() is None and not (log.exists() and log.stat().st_size > written):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        if process.wait():
            ends.append(process.returncode or 0)
        else:  # it was through before the signal came
            shutil.rmtree(out)
    assert {*ends} == {-signal.SIGKILL}
    here(small, out, method, resume=True)
    assert outcome(out) == whole


def config(out: Path, model: Any, method: Any = "sft", **changes: Any) -> TrainMemoryConfig:
    given = {"world": MemoryWorldConfig(dialogues=2, sessions=2, evaluate=1), "steps": 1, "batch_size": 2}
    return TrainMemoryConfig(str(out), method, str(model), **{**given, **changes})


def test_a_terminated_run_ends_its_generation_and_goes_on(small: Path, tmp_path: Path) -> None:
    class Stopping(train.MemBuilderTask):
        def episode(self, row: int) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().episode(row)

    rl = PolicyGradientConfig(group=2, inner_epochs=2, reply_tokens=4)
    cfg = config(tmp_path / "run", small, "adrpo", rl=rl, steps=2)
    with pytest.raises(SystemExit, match="143"):
        train.train_memory(cfg, Stopping)
    out = train.train_memory(replace(cfg, resume=True))
    assert [row["step"] for row in outcome(out)[0]] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    # others may serve the policy
    assert {file.stat().st_mode for file in (out / "policy").iterdir()} == {(out / "config.yaml").stat().st_mode}
    with pytest.raises(ConfigError, match="already holds a run"):
        train.train_memory(cfg)
    with pytest.raises(ConfigError, match=r"other settings \(rl\.alpha\)"):
        train.train_memory(replace(cfg, rl=replace(rl, alpha=1.0), resume=True))


def test_what_cannot_be_trained_leaves_no_folder(small: Path, tmp_path: Path) -> None:
    for model, vllm, message in (("/no/where", "off", "no such folder"), (small, "colocate", "needs the package vllm")):
        with pytest.raises(ModelError, match=message):
            train.train_memory(config(tmp_path / "run", model, "adrpo", rl=PolicyGradientConfig(vllm=vllm)))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="core_free"):
        RewardConfig(core_free=400.0)
