"""FSDP2, forced on the CPU with gloo: equal to plain processes, and resumed on other numbers of processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from remind.alignment.metrics import read_metrics

SCRIPT = Path(__file__).with_name("sharded.py")
KINDS = ("live", "base", "ema", "pixels", "bf16")
RESUMED = ("live", "ema")
pytestmark = pytest.mark.slow


def launch(processes: int, jobs: Sequence[str]) -> None:
    """One start of processes for several runs, as starting takes longer than running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REMIND_QUIET": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*command, str(SCRIPT), *jobs], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all kinds on two processes, and those that go on from step 2 of four on one, two and three."""
    folder = tmp_path_factory.mktemp("runs")
    launch(2, [f"{how}/{kind}{folder}/{how}-{kind}" for kind in KINDS for how in ("fsdp", "ddp")])
    for processes in (1, 2, 3):
        jobs = []
        for kind in RESUMED:
            out = folder / f"{processes}-{kind}"
            shutil.copytree(folder / f"fsdp-{kind}", out)
            shutil.rmtree(out / "checkpoint-4")
            jobs.append(f"fsdp/{kind}{out}")
        launch(processes, jobs)
    return folder


def losses(out: Path) -> Tensor:
    return torch.tensor([row["total"] for row in read_metrics(out) if row["kind"] == "train"])


def farthest(one: Path, other: Path) -> float:
    """Largest difference of two weights after four steps."""
    weights, others = (load_file(out / "checkpoint-4" / "model.safetensors") for out in (one, other))
    names = (weights.keys() | others.keys()) - {"lm_head.weight"}  # tied to the embedding
    return max(float((weights[name] - others[name]).abs().max()) for name in names)


@pytest.mark.parametrize("kind", ["live", "base", "ema", "pixels"])
def test_it_is_plain_processes(kind: str, runs: Path) -> None:
    """Text and pixels, a tied head, teachers that are fixed or an average; the last batch of an epoch is smaller."""
    one, other = runs / f"fsdp-{kind}", runs / f"ddp-{kind}"
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-4, atol=0)
    # four steps of AdamW move a weight by at most 4e-3
    assert farthest(one, other) < 4e-4


def test_mixed_precision(runs: Path) -> None:
    """Positions and weights of samples are not rounded: the first loss is within bfloat16 of that in float32."""
    one, other = losses(runs / "fsdp-bf16"), losses(runs / "ddp-live")
    torch.testing.assert_close(one[:1], other[:1], rtol=0.02, atol=0)
    weights = load_file(runs / "fsdp-bf16" / "checkpoint-4" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("kind", RESUMED)
def test_resumed(kind: str, processes: int, runs: Path) -> None:
    difference = farthest(runs / f"{processes}-{kind}", runs / f"fsdp-{kind}")
    assert difference == 0 if processes == 2 else difference < 4e-4
