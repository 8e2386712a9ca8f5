"""Runs of `remind train-memory`: in two processes as in one, and killed anywhere with the same bits at the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from forked import Forked

pytest.importorskip("trl", reason="needs the extra rl")

from safetensors.torch import load_file

from remind.memory_training import pico

#: Tasks whose rewards tell replies of random weights apart, and two rollouts of a role compared.
SCRIPT = """
import sys
from collections import Counter
from dataclasses import replace
from remind.core.cli import parse
from remind.memory_training import train
from remind.memory_training.config import TrainMemoryConfig
from remind.memory_training.episodes import Prompt, Scores
from remind.memory_training.rewards import ROLES, Pair
from remind.memory_training.trainer import MemoryGRPOTrainer

class Words(train.MemBuilderTask):
    def score(self, row, outcomes):
        rewards = {role: [float(len(set(one[n].split()))) for one in outcomes] for n, role in enumerate(ROLES)}
        return Scores(rewards, {"semantic": [4.0] * len(outcomes)}, (Pair("booster", 0, 1, 0.5),))

class Numbers(train.SaliMoryTask):
    def episode(self, row):
        # the same turns stand in several rows: a mark of the row tells their prompts apart
        inner, replies = super().episode(row), None
        while True:
            try:
                asked = inner.send(replies)
            except StopIteration as end:
                return end.value
            replies = yield [Prompt(one.role, [*one.ids, 50 + row]) for one in asked]

    def score(self, row, outcomes):
        rewards = [float(n) for n in range(len(outcomes))]
        return Scores(dict.fromkeys(("filter", "booster", "utilizer"), rewards), pairs=(Pair("utilizer", 1, 0, 0.5),))

def scripted(self, prompts, *_):
    # a function of the prompt and of how often it was asked
    seen, replies = Counter(), []
    for prompt in prompts:
        seen[tuple(prompt)] += 1
        count = sum(prompt) + seen[tuple(prompt)]
        replies.append([count * k % 200 + 2 for k in range(1, 2 + count % 4)] + [1])
    return replies, None

train.MemBuilderTask, train.SaliMoryTask = Words, Numbers
if "--scripted" in sys.argv:
    sys.argv.remove("--scripted")
    MemoryGRPOTrainer._generate_single_turn = scripted
train.train_memory(parse(TrainMemoryConfig, sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    pico.write_pico(folder / "pico", 0, layers=2, hidden_size=32)
    (folder / "run.py").write_text(SCRIPT)
    return folder / "run.py"


def start(script: Path, out: Path, method: str, *more: object, processes: int = 1) -> Forked:
    words = f"--out {out} --method {method} --model {script.parent / 'pico'} --lr 1e-2 --steps 3 --batch_size 4"
    words += " --world.dialogues 2 --world.sessions 2 --world.evaluate 1 --save_every 1"
    words += " --rl.group 2 --rl.reply_tokens 6 --rl.inner_epochs 2"
    return Forked(
        script, *words.split(), *more, environment={**os.environ, "OMP_NUM_THREADS": "1"}, processes=processes
    )


def outcome(out: Path) -> tuple[object, ...]:
    """What a run comes to, less what tells time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "cpu_seconds", "step_time")
    timeless = [{name: value for name, value in row.items() if name not in times} for row in rows]
    return timeless, (out / "report.json").read_text(), (out / "policy" / "model.safetensors").read_bytes()


def ended(process: Forked) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "adrpo", "salimory"])
def test_two_processes_train_as_one_does(script: Path, tmp_path: Path, method: str) -> None:
    """To rounding, for the same replies: each process samples its own."""
    for processes in (1, 2):
        ended(start(script, tmp_path / str(processes), method, "--scripted", processes=processes))
    one, two = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("1", "2"))
    first = load_file(script.parent / "pico" / "model.safetensors")
    assert max(float((one[name] - first[name]).abs().max()) for name in one) > 1e-2
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adrpo", "salimory"])
def test_runs_killed_at_random_end_with_the_same_bits(script: Path, tmp_path: Path, method: str) -> None:
    """SIGKILL anywhere: while it starts, samples, scores, updates, writes a checkpoint or evaluates."""
    ended(start(script, tmp_path / "whole", method))
    whole, out = outcome(tmp_path / "whole"), tmp_path / "out"
    assert whole[2] != (script.parent / "pico" / "model.safetensors").read_bytes()
    log = out / "metrics.jsonl"
    kills, draw, done = int(os.environ.get("REMIND_KILLS", "2")), random.Random(method), 0
    while done < kills:
        written = log.stat().st_size if log.exists() else 0
        process, early = start(script, out, method, "--resume", "true"), draw.random() < 0.3
        while process.poll() is None and not (
            (out / "config.yaml").exists() if early else log.exists() and log.stat().st_size > written
        ):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 1.0 if early else 0.2))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), errors[-2000:]
        if process.returncode:
            done += 1
        else:  # it was through before the signal came
            assert outcome(out) == whole
            shutil.rmtree(out)
    ended(start(script, out, method, "--resume", "true"))
    assert outcome(out) == whole
    assert not [path for path in out.rglob("*") if path.name.endswith((".tmp", ".old"))]
