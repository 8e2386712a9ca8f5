"""Runs that are killed, at random moments and between every two files of a save, and go on to the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from remind.alignment.config import Edge, LoraConfig, Objective
from remind.alignment.metrics import METRICS, checkpoints
from remind.alignment.trainer import PRATrainer
from remind.core.files import read_json
from remind.train_pra.config import DataConfig
from remind.train_pra.run import train

pytestmark = pytest.mark.slow
KINDS: dict[str, dict[str, Any]] = {
    "live": {},
    "ema": {"objective": Objective(teacher_model_kind="ema"), "lora": LoraConfig(r=2)},
    "base": {"objective": Objective(teacher_model_kind="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))},
    "on_policy": {"data": DataConfig(max_decoded=4, targets="on_policy", refresh_steps=3, temperature=1.0)},
}
STEPS = 8
KILLS = int(os.environ.get("REMIND_KILLS", "2"))


def assert_as_never_killed(runs: Any, killed: Path, whole: Path) -> None:
    runs.assert_same_runs(killed, whole, STEPS)
    mine, theirs = (read_json(run / f"checkpoint-{STEPS}" / "trainer_state.json") for run in (killed, whole))
    for name in ("best_global_step", "best_metric"):
        assert mine[name] == theirs[name]
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_at_random_end_with_the_same_bits(runs: Any, states: Path, tmp_path: Path, kind: str) -> None:
    """SIGKILL anywhere: while it tokenises, decodes, caches targets, trains, evaluates or writes a checkpoint."""
    changes = {"data": DataConfig(max_decoded=4), **KINDS[kind]}
    cfg = runs.config(states, tmp_path / "whole", num_train_epochs=2, batch_size=2, save_steps=1, **changes)
    whole = train(cfg)
    killed = replace(cfg, out=str(tmp_path / "killed"), resume=True)
    begun, log = tmp_path / "begun", tmp_path / "killed" / METRICS
    front = f"from pathlib import Path\nPath({str(begun)!r}).touch()"
    draw, done = random.Random(kind), 0
    while done < KILLS:
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
    runs.through(killed)
    assert_as_never_killed(runs, tmp_path / "killed", whole)


def test_a_save_killed_between_any_two_files_is_made_again(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder as it is on disk, which is what SIGKILL leaves, whenever the names in it have changed.

    Of the third of four saves, after which the second checkpoint goes, file by file.
    """
    save, moments = PRATrainer._save_checkpoint, [tmp_path / "0"]

    def watched(self: PRATrainer, *args: Any) -> None:
        out = Path(self.args.output_dir)
        seen = sorted(out.rglob("*"))

        def look(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            if event in ("return", "c_return") and (now := sorted(out.rglob("*"))) != seen:
                seen = now
                moments.append(tmp_path / str(len(moments)))
                shutil.copytree(out, moments[-1])

        if self.state.global_step == 3:
            shutil.copytree(out, moments[0])
            sys.setprofile(look)
        try:
            save(self, *args)
        finally:
            sys.setprofile(None)

    changes = {"save_steps": 1, "save_total_limit": 1, "max_steps": 4, "eval_strategy": "no"}
    cfg = runs.config(states, tmp_path / "whole", lora=LoraConfig(r=2), **changes)
    with monkeypatch.context() as patch:
        patch.setattr(PRATrainer, "_save_checkpoint", watched)
        whole = train(cfg)
    held = [{str(path.relative_to(moment)) for path in moment.glob("checkpoint-*/*")} for moment in moments]
    for file in (whole / "checkpoint-4").iterdir():
        new, old = f"checkpoint-3/{file.name}", f"checkpoint-2/{file.name}"
        # there is a moment at which each file of the save was the last one, and one at which it was the first to go
        assert any(new in now and new not in before for before, now in pairwise(held)), new
        assert any(old in before and old not in now for before, now in pairwise(held)), old
    for moment in random.Random(0).sample(moments, min(5 * KILLS, len(moments))):
        train(replace(cfg, out=str(moment), resume=True))
        runs.assert_same_runs(moment, whole, 4)
        assert [folder.name for folder in checkpoints(moment)] == ["checkpoint-4"]
