"""The step and its checkpoints under FSDP2, on two CPU processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCRIPT = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from remind.alignment import Objective, checkpoint
from remind.alignment.example import Example
from remind.alignment.model import checkpoint_activations, trainable
from remind.alignment.optim import adamw
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.models.nano import nano_model

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ids = [[torch.randint(0, 999, (n,), dtype=torch.int32) for n in lengths] for lengths in ((5, 7, 9, 4), (8, 6, 12, 1))]
examples = [Example(str(k), tuple(x[:3]), x[3]) for k, x in enumerate(ids)]
objective = Objective(chunk=2)


def step(module, chosen, scale):
    run(module, collate(chosen, [0.5] * len(chosen)), plan(objective), lambda loss: (loss * scale).backward())


plain = AlignmentModel(trainable(nano_model().double(), None), objective)
step(plain, examples, 1)
expected = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
optimizer = adamw(plain, 1e-3, 0.1)
optimizer.step()

model = trainable(nano_model().double(), None)
checkpoint_activations(model)
module = AlignmentModel(model, objective)
mesh = dist.init_device_mesh("cpu", (2,))
for block in model.model.language_model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(module, mesh=mesh)
shards = adamw(module, 1e-3, 0.1)
step(module, [examples[rank]], 2)
for name, parameter in model.named_parameters():
    if parameter.requires_grad:
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-12)
shards.step()
shards.zero_grad()

folder = Path(sys.argv[1])
states = checkpoint.random_state(torch.device("cpu"))[None]
checkpoint.save(folder, 1, model, shards, states, {}, writes=rank == 0)
dist.barrier()
saved = load_file(folder / "model.safetensors")
for name, value in checkpoint.trained_parameters(plain.model).items():
    torch.testing.assert_close(saved[name], value.detach(), rtol=1e-7, atol=1e-7)

step(module, [examples[rank]], 2)
shards.step()
shards.zero_grad()
checkpoint.restore_model(folder, model)
checkpoint.restore_optimizer(folder, model, shards)
moments = load_file(folder / "optimizer.safetensors")
for name, parameter in checkpoint.trained_parameters(model).items():
    assert torch.equal(parameter.full_tensor(), saved[name])
    assert torch.equal(shards.state[parameter]["exp_avg_sq"].full_tensor(), moments[f"exp_avg_sq/{name}"])
dist.destroy_process_group()
print(f"rank {rank} is through", flush=True)
# torch's own threads now and then abort a process that tears down as usual, after all of the above has held
os._exit(0)
"""


@pytest.mark.slow
def test_shards_give_the_gradient_and_the_checkpoint_of_one_process(two_processes: Callable[..., None]) -> None:
    two_processes(SCRIPT)
