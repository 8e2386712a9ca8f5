"""Prefix sharing and fixed teachers under DDP and FSDP2, on two CPU processes, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCRIPT = """
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from remind.alignment import Edge, Objective
from remind.alignment.example import Example
from remind.alignment.fixed import HiddenTeacher, teach
from remind.alignment.model import checkpoint_activations, trainable
from remind.alignment.step import AlignmentModel, collate, head_weight, plan, run
from remind.models.nano import nano_model

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
examples = []
for number, (start, summary, question, answer) in enumerate(((9, 4, 3, 4), (14, 6, 2, 1))):
    ids = [torch.randint(0, 999, (n,), dtype=torch.int32) for n in (start, summary, question, answer)]
    prompts = (ids[0].flip(0), torch.cat([ids[0], ids[2]]), torch.cat(ids[:3]))
    examples.append(Example(str(number), prompts, ids[3]))


def step(module, objective, chosen, scale, sharing, fixed=None):
    unsynced = getattr(module, "no_sync", nullcontext)
    batch = collate(chosen, [0.5] * len(chosen))
    passes = plan(objective, prefix_sharing=sharing)
    return run(module, batch, passes, lambda loss: (loss * scale).backward(), unsynced, fixed=fixed)


def wrap(objective):
    model = trainable(nano_model().double(), None)
    checkpoint_activations(model)
    module = AlignmentModel(model, objective)
    if sys.argv[1] == "ddp":
        return model, DistributedDataParallel(module)
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in model.model.language_model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return model, module


base = Objective(edges=(Edge(0, 1), Edge(0, 2)), teacher_weights="base", chunk=2)
for objective in (Objective(chunk=2), base):
    plain = AlignmentModel(trainable(nano_model().double(), None), objective)
    model, module = wrap(objective)
    fixed = mine = None
    if objective is base:
        head = head_weight(plain.model).detach().clone()
        batch = collate(examples, [0.5, 0.5])
        fixed = {k: HiddenTeacher(h, head) for k, h in teach(plain, batch, (1, 2)).items()}
        own = teach(module, collate([examples[rank]], [0.5]), (1, 2), prefix_sharing=True)
        mine = {k: HiddenTeacher(h, head) for k, h in own.items()}
        for level in (1, 2):
            torch.testing.assert_close(own[level], fixed[level].hidden[batch.rows == rank], rtol=1e-9, atol=1e-10)
    expected = step(plain, objective, examples, 1, False, fixed)
    gradients = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
    found = step(module, objective, [examples[rank]], 2, True, mine)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value[rank : rank + 1], rtol=1e-9, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            torch.testing.assert_close(grad, gradients[name], rtol=1e-9, atol=1e-12)
dist.destroy_process_group()
print(f"rank {rank} is through", flush=True)
# torch's own threads now and then abort a process that tears down as usual, after all of the above has held
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_have_the_gradient_of_one(two_processes: Callable[..., None], kind: str) -> None:
    two_processes(SCRIPT, kind)
