"""AdamW with moments of 8 bits under FSDP2, on two CPU processes with weights in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from remind.models.load import load_backbone

SCRIPT = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from remind.alignment import checkpoint
from remind.alignment.model import trainable
from remind.alignment.optim import make_optimizer
from remind.models.nano import nano_model

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
mesh = dist.init_device_mesh("cpu", (2,))


def begin(shard=True):
    model = trainable(nano_model(layers=2).bfloat16(), None)
    if shard:
        for block in model.model.language_model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, make_optimizer(model, "adamw8bit", 1e-3, 0.1)


def step(model, optimizer, seed):
    # gradients made up, the same for a parameter and its shards
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in checkpoint.trained_parameters(model).items():
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = checkpoint._like(grad, parameter)
    optimizer.step()
    optimizer.zero_grad()


model, optimizer = begin()
step(model, optimizer, 0)
state = optimizer.state[next(iter(checkpoint.trained_parameters(model).values()))]
assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].dtype == torch.int8
checkpoint.save(folder, 1, model, optimizer, checkpoint.random_state(torch.device("cpu"))[None], {}, writes=rank == 0)
dist.barrier()

# blocks are those of one process: scales are equal, codes and weights are so up to their rounding
one, single = begin(shard=False)
step(one, single, 0)
moments, weights = load_file(folder / "optimizer.safetensors"), load_file(folder / "model.safetensors")
for name, parameter in checkpoint.trained_parameters(one).items():
    for key in ("exp_avg", "exp_avg_sq"):
        mine, saved = single.state[parameter], {k: moments[f"{k}/{name}"] for k in single.state[parameter]}
        assert all(saved[k].shape == v.shape and saved[k].dtype == v.dtype for k, v in mine.items())
        if f"{key}_scale" in mine:
            assert torch.equal(mine[f"{key}_scale"], saved[f"{key}_scale"])
            # one code up or down
            low, high = mine[key].int(), saved[key].int()
            assert int((low - high).abs().max()) <= 1
        else:
            assert torch.equal(mine[key], saved[key])
    gap = (weights[name].float() - parameter.detach().float()).abs()
    assert torch.all(gap <= parameter.detach().float().abs() * 2**-7 + 1e-6), name
    if parameter.ndim == 2:
        assert float((weights[name].float() - parameter.detach().float()).mean().abs()) < 1e-5, name

# going on from the checkpoint is going on
step(model, optimizer, 1)
expected = {name: p.full_tensor().clone() for name, p in checkpoint.trained_parameters(model).items()}
again, fresh = begin()
checkpoint.restore_model(folder, again)
checkpoint.restore_optimizer(folder, again, fresh)
step(again, fresh, 1)
for name, parameter in checkpoint.trained_parameters(again).items():
    assert torch.equal(parameter.full_tensor(), expected[name]), name
# and one process can go on from what two have saved
checkpoint.restore_model(folder, one)
checkpoint.restore_optimizer(folder, one, single)
step(one, single, 1)
for name, parameter in checkpoint.trained_parameters(one).items():
    gap = (parameter.detach().float() - expected[name].float()).abs()
    assert float(gap.max()) < 0.02, name

dist.destroy_process_group()
print(f"rank {rank} is through", flush=True)
# torch's own threads now and then abort a process that tears down as usual, after all of the above has held
os._exit(0)
"""


@pytest.mark.slow
def test_shards_have_the_blocks_of_one_process_and_resume_to_the_bit(two_processes: Callable[..., None]) -> None:
    two_processes(SCRIPT)


@pytest.mark.slow
def test_the_shipped_config_and_launcher_train_in_bfloat16(states: Path, tmp_path: Path, runs: Any) -> None:
    launcher = yaml.safe_load((runs.ROOT / "configs/accelerate/fsdp2_bf16_2gpu.yaml").read_text())
    (tmp_path / "launcher.yaml").write_text(yaml.safe_dump({**launcher, "use_cpu": True}))
    (tmp_path / "script.py").write_text(f"{runs.FRONT}{runs.END}")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launcher.yaml")]
    command += [str(tmp_path / "script.py"), "--config", str(runs.ROOT / "configs/pra_qwen3_vl_8b_full.yaml")]
    command += [
        "--model",
        "nano-untrained",
        "--states",
        str(states),
        "--out",
        str(tmp_path / "run"),
        "--trainer.max_steps",
        "2",
    ]
    command += ["--trainer.save_every", "1", "--trainer.keep_last", "2", "--data.unlabelled", "skip"]
    done = subprocess.run(command, env=runs.environment(OMP_NUM_THREADS="1"), capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    first, second = (runs.weights(tmp_path / "run", step) for step in (1, 2))
    assert {value.dtype for value in second.values()} == {torch.bfloat16}
    start = dict(load_backbone("nano-untrained").model.bfloat16().named_parameters())
    # at a rate of a hundred-thousandth, in bfloat16
    for before, after in ((start, first), (first, second)):
        moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
        assert len(moved) > len(after) / 2
    moments = runs.weights(tmp_path / "run", 2, "optimizer")
    assert {value.dtype for value in moments.values()} == {torch.int8, torch.uint8, torch.float32}
