"""Averages and base targets on two processes: data parallel, and sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from remind.alignment.objective import Edge, Objective
from remind.alignment.teachers import TeacherConfig
from remind.alignment.trainer import train

EMA = Objective(teacher_weights="ema")
BASE = Objective(teacher_weights="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ema", "base"])
def test_two_processes_are_one(runs: Any, states: Path, tmp_path: Path, kind: str) -> None:
    """Unequal answers, and a last window that leaves the second process with nothing."""
    cfg = runs.config(
        states, tmp_path / "one", objective={"ema": EMA, "base": BASE}[kind], batch_size=5, gradient_accumulation=2,
        save_every=1, keep_last=9, max_steps=4, teacher=TeacherConfig(ema_decay=0.5),
    )  # fmt: skip
    one = train(cfg)
    process = runs.start(replace(cfg, out=str(tmp_path / "two")), processes=2)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-2000:]
    two = tmp_path / "two"
    names = ("model", "ema") if kind == "ema" else ("model",)
    gradient, other = (runs.weights(run, 1, "optimizer") for run in (one, two))
    for key in gradient:
        if key.startswith("exp_avg/"):
            assert relative(other[key], gradient[key]) < 2e-6, key
    for name in names:
        for key, value in runs.weights(one, 4, name).items():
            assert relative(runs.weights(two, 4, name)[key], value) < 1e-4, (name, key)
    for row, same in zip(runs.timeless(one), runs.timeless(two), strict=True):
        if row["kind"] == "train":
            assert same["total"] == pytest.approx(row["total"], rel=1e-6 if row["step"] == 1 else 1e-3)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


SHARDED = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from safetensors.torch import load_file
from remind.alignment import Objective, checkpoint
from remind.alignment.batch import collate
from remind.alignment.example import Example
from remind.alignment.model import trainable
from remind.alignment.optim import adamw
from remind.alignment.step import AlignmentModel, plan, run
from remind.alignment.teachers import Ema
from remind.models.nano import nano_model

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ids = [[torch.randint(0, 999, (n,), dtype=torch.int32) for n in lengths] for lengths in ((5, 7, 9, 4), (8, 6, 12, 1))]
examples = [Example(str(k), tuple(x[:3]), x[3]) for k, x in enumerate(ids)]
objective = Objective(chunk=2, teacher_weights="ema")

def step(module, optimizer, ema, chosen, scale):
    batch = collate(chosen, [0.5] * len(chosen))
    (fixed,) = ema.of(module, [chosen], [batch])
    run(module, batch, plan(objective), lambda loss: (loss * scale).backward(), fixed=fixed)
    optimizer.step()
    optimizer.zero_grad()
    ema.update()

plain = AlignmentModel(trainable(nano_model().double(), None), objective)
optimizer, average = adamw(plain, 1e-2, 0.1), Ema(plain.model, 0.5, (1, 2))
module = AlignmentModel(trainable(nano_model().double(), None), objective)
mesh = dist.init_device_mesh("cpu", (2,))
for block in module.model.model.language_model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(module, mesh=mesh)
shards, sharded = adamw(module, 1e-2, 0.1), Ema(module.model, 0.5, (1, 2))
for _ in range(3):
    step(plain, optimizer, average, examples, 1)
    step(module, shards, sharded, [examples[rank]], 2)
for name, value in average.shadow.items():
    torch.testing.assert_close(sharded.shadow[name].full_tensor(), value, rtol=1e-6, atol=1e-9)
for name, parameter in checkpoint.trained_parameters(module.model).items():
    expected = plain.model.get_parameter(name)
    torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-6, atol=1e-9)

folder = Path(sys.argv[1])
states = checkpoint.random_state(torch.device("cpu"))[None]
checkpoint.save(folder, 3, module.model, shards, states, {}, rank == 0, sharded.shadow)
dist.barrier()
step(module, shards, sharded, [examples[rank]], 2)
checkpoint.restore_ema(folder, sharded.shadow)
for name, value in load_file(folder / "ema.safetensors").items():
    assert torch.equal(sharded.shadow[name].full_tensor(), value)
print(f"rank {rank} is through", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_averages_of_shards_are_those_of_the_whole(two_processes: Callable[..., None]) -> None:
    two_processes(SHARDED)
