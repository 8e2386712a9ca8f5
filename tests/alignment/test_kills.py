"""Runs that are killed at random moments, or find no space on the disk, and go on to the same bits."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from remind.alignment.metrics import METRICS, checkpoints, kept
from remind.core.errors import RemindError
from remind.train_pra.config import DataConfig
from remind.train_pra.run import train
from tests.alignment.test_checkpoint import KINDS

pytestmark = pytest.mark.slow
STEPS = 8
ENDS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
KILLS = int(os.environ.get("REMIND_KILLS", "3"))


@pytest.mark.parametrize("kind", ["ema", "base", "on_policy"])
def test_runs_killed_at_random_end_with_the_same_bits(runs: Any, states: Path, tmp_path: Path, kind: str) -> None:
    """Anywhere: while it tokenises, decodes, caches targets, trains, evaluates or writes a checkpoint; by SIGKILL, or
    by Ctrl-C and SIGTERM, which end in one line."""
    changes = {"data": DataConfig(max_decoded=4), **KINDS[kind]}
    cfg = runs.config(states, tmp_path / "whole", num_train_epochs=2, batch_size=2, save_steps=1, **changes)
    whole = train(cfg)
    killed = replace(cfg, out=str(tmp_path / "killed"), resume=True)
    log = tmp_path / "killed" / METRICS
    draw, done = random.Random(kind), 0
    while done < KILLS:
        before = log.stat().st_size if log.exists() else 0
        process = runs.start(killed)
        end = ENDS[done % len(ENDS)]
        # the others end in a line once the command has begun
        early = end == signal.SIGKILL and draw.random() < 0.5
        while process.poll() is None and not early and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 2.0 if early else 0.12))
        process.send_signal(end)
        _, errors = process.communicate()
        if process.returncode == 0:  # it was through before the signal came
            shutil.rmtree(tmp_path / "killed")
            continue
        if end == signal.SIGKILL:
            assert process.returncode == -end, errors[-2000:]
        else:
            assert (process.returncode, errors.count("stopped by")) == (128 + end, 1), errors[-2000:]
            assert "Traceback" not in errors
        done += 1
    train(killed)
    runs.assert_same_runs(tmp_path / "killed", whole, STEPS)


#: The kernel refuses to let a file grow past a size: of a checkpoint's moments, or of the metrics.
@pytest.mark.parametrize(("file", "size"), [("checkpoint-3", 8_000_000), ("metrics.jsonl", 2_000)])
def test_no_space_loses_nothing(runs: Any, run: Path, states: Path, tmp_path: Path, file: str, size: int) -> None:
    cfg = runs.config(states, tmp_path / "r", save_steps=1, save_total_limit=None)
    full, before = TrainerCallback(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    full.on_step_begin = limit  # type: ignore[method-assign]
    try:
        with pytest.raises((RemindError, OSError), match=rf"^[^\n]*{file}[^\n]*$"):
            train(cfg, full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [f.name for f in checkpoints(tmp_path / "r") if kept(f)] == ["checkpoint-1", "checkpoint-2"]
    train(replace(cfg, resume=True))
    runs.assert_same_runs(tmp_path / "r", run)
