"""Whole runs that are killed at random moments, and go on to the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remind.alignment.config import DataConfig, Edge, Objective
from remind.alignment.metrics import METRICS
from remind.alignment.trainer import train
from remind.core.files import read_json

OBJECTIVES = {
    "live": Objective(),
    "ema": Objective(teacher_weights="ema"),
    "base": Objective(teacher_weights="base", edges=(Edge(0, 1), Edge(0, 2, 1.0))),
    "on_policy": Objective(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_runs_killed_at_random_end_with_the_same_bits(runs: Any, states: Path, tmp_path: Path, kind: str) -> None:
    """SIGKILL anywhere: while it tokenises, decodes, caches targets, trains, evaluates or writes a checkpoint."""
    data = DataConfig(max_decoded=4)
    if kind == "on_policy":
        data = replace(data, targets="on_policy", refresh_steps=3, temperature=1.0)
    cfg = runs.config(
        states, tmp_path / "whole", objective=OBJECTIVES[kind], data=data, epochs=2, batch_size=2, save_every=1
    )
    whole = train(cfg)
    killed = replace(cfg, out=str(tmp_path / "killed"), resume=True)
    begun, log = tmp_path / "begun", tmp_path / "killed" / METRICS
    front = f"from pathlib import Path\nPath({str(begun)!r}).touch()"
    kills, draw, done = int(os.environ.get("REMIND_KILLS", "2")), random.Random(kind), 0
    while done < kills:
        begun.unlink(missing_ok=True)
        before = log.stat().st_size if log.exists() else 0
        process = runs.start(killed, front)
        early = draw.random() < 0.3
        while process.poll() is None and not (begun if early else log).exists():
            time.sleep(0.002)
        while process.poll() is None and not early and log.stat().st_size == before:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 1.0 if early else 0.12))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:  # it was through before the signal came
            shutil.rmtree(tmp_path / "killed")
            continue
        assert process.returncode == -signal.SIGKILL, errors[-2000:]
        done += 1
    process = runs.start(killed)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-2000:]
    for name in ("model", "optimizer", *(["ema"] if kind == "ema" else [])):
        found, expected = (runs.weights(run, 8, name) for run in (tmp_path / "killed", whole))
        runs.assert_identical(found, expected)
    assert runs.timeless(tmp_path / "killed") == runs.timeless(whole)
    assert read_json(tmp_path / "killed" / "best.json") == read_json(whole / "best.json")
