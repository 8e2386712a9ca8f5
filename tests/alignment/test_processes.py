"""The step, its teachers and its checkpoints on two CPU processes, under DDP and FSDP2, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from remind.alignment.config import DataConfig, Edge, LoraConfig, Objective, TeacherConfig
from remind.alignment.run_folder import CONFIG, as_dict
from remind.alignment.trainer import train
from remind.core.cli import parse
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

from remind.alignment import Edge, Objective, checkpoint
from remind.alignment.model import checkpoint_activations, head_weight, trainable
from remind.alignment.objective import HiddenTeacher
from remind.alignment.checkpoint import like
from remind.alignment.optim import make_optimizer
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.alignment.teachers import Ema, teach
from remind.alignment.tokens import Example
from remind.models.nano import nano_model

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
torch.manual_seed(0)
examples = []
for number, (start, summary, question, answer) in enumerate(((9, 4, 3, 4), (14, 6, 2, 1))):
    ids = [torch.randint(0, 999, (n,), dtype=torch.int32) for n in (start, summary, question, answer)]
    prompts = (ids[0].flip(0), torch.cat([ids[0], ids[2]]), torch.cat(ids[:3]))
    examples.append(Example(str(number), prompts, ids[3]))
RANDOM = checkpoint.random_state(torch.device("cpu"))[None]


def step(module, objective, chosen, scale, sharing, fixed=None):
    batch = collate(chosen, [0.5] * len(chosen))
    passes = plan(objective, prefix_sharing=sharing)
    return run(module, batch, passes, lambda loss: (loss * scale).backward(), fixed=fixed)


def shard(module, model):
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in model.model.language_model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def wrap(objective):
    model = trainable(nano_model().double(), None)
    checkpoint_activations(model)
    module = AlignmentModel(model, objective)
    shard(module, model)
    return model, module


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


# gradients with prefix sharing and with fixed teachers
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
    values = step(module, objective, [examples[rank]], 2, True, mine)
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value[rank : rank + 1], rtol=1e-9, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(whole(parameter.grad), gradients[name], rtol=1e-9, atol=1e-12)

# running averages, and the checkpoint of shards
objective = Objective(chunk=2, teacher_weights="ema")
plain = AlignmentModel(trainable(nano_model().double(), None), objective)
optimizer, average = make_optimizer(plain, "adamw", 1e-2, 0.1), Ema(plain.model, 0.5, (1, 2))
model, module = wrap(objective)
shards, sharded = make_optimizer(module, "adamw", 1e-2, 0.1), Ema(model, 0.5, (1, 2))

def train_step(module, optimizer, ema, chosen, scale):
    batch = collate(chosen, [0.5] * len(chosen))
    (fixed,) = ema.of(module, [chosen], [batch])
    step(module, objective, chosen, scale, False, fixed)
    optimizer.step()
    optimizer.zero_grad()
    ema.update()

for _ in range(3):
    train_step(plain, optimizer, average, examples, 1)
    train_step(module, shards, sharded, [examples[rank]], 2)
for name, value in average.shadow.items():
    torch.testing.assert_close(sharded.shadow[name].full_tensor(), value, rtol=1e-6, atol=1e-9)
for name, parameter in checkpoint.trained_parameters(model).items():
    expected = plain.model.get_parameter(name)
    torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-6, atol=1e-9)
checkpoint.save(folder / "c", 3, model, shards, RANDOM, {}, rank == 0, sharded.shadow)
dist.barrier()
weights = load_file(folder / "c" / "model.safetensors")
moments = load_file(folder / "c" / "optimizer.safetensors")
train_step(module, shards, sharded, [examples[rank]], 2)
checkpoint.restore_model(folder / "c", model)
checkpoint.restore_optimizer(folder / "c", model, shards)
checkpoint.restore_ema(folder / "c", sharded.shadow)
for name, parameter in checkpoint.trained_parameters(model).items():
    assert torch.equal(parameter.full_tensor(), weights[name])
    assert torch.equal(shards.state[parameter]["exp_avg_sq"].full_tensor(), moments[f"exp_avg_sq/{name}"])
for name, value in load_file(folder / "c" / "ema.safetensors").items():
    assert torch.equal(sharded.shadow[name].full_tensor(), value)

# 8-bit moments of shards: saved whole, and resumed to the bit
def begin():
    model = trainable(nano_model(layers=2).bfloat16(), None)
    shard(model, model)
    return model, make_optimizer(model, "adamw8bit", 1e-3, 0.1)

def made_up_step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in checkpoint.trained_parameters(model).items():
        parameter.grad = like(torch.randn(parameter.shape, generator=generator).bfloat16(), parameter)
    optimizer.step()
    optimizer.zero_grad()

model, optimizer = begin()
made_up_step(model, optimizer, 0)
checkpoint.save(folder / "q", 1, model, optimizer, RANDOM, {}, rank == 0)
dist.barrier()
# blocks are those of one process: scales are equal, codes are so up to their rounding
moments = load_file(folder / "q" / "optimizer.safetensors")
one = trainable(nano_model(layers=2).bfloat16(), None)
single = make_optimizer(one, "adamw8bit", 1e-3, 0.1)
made_up_step(one, single, 0)
for name, parameter in checkpoint.trained_parameters(one).items():
    for key, mine in single.state[parameter].items():
        saved = moments[f"{key}/{name}"]
        assert saved.shape == mine.shape and saved.dtype == mine.dtype
        if mine.dtype in (torch.int8, torch.uint8):
            assert int((mine.int() - saved.int()).abs().max()) <= 1
        else:
            assert torch.equal(mine, saved)
made_up_step(model, optimizer, 1)
expected = {name: p.full_tensor().clone() for name, p in checkpoint.trained_parameters(model).items()}
again, fresh = begin()
checkpoint.restore_model(folder / "q", again)
checkpoint.restore_optimizer(folder / "q", again, fresh)
made_up_step(again, fresh, 1)
for name, parameter in checkpoint.trained_parameters(again).items():
    assert torch.equal(parameter.full_tensor(), expected[name]), name
dist.destroy_process_group()
print(f"rank {rank} is through", flush=True)
# torch's own threads now and then abort a process that tears down as usual, after all of the above has held
os._exit(0)
"""


@pytest.mark.slow
def test_gradients_averages_and_checkpoints_of_shards_are_those_of_one_process(two_processes: Any) -> None:
    two_processes(SCRIPT)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


BASE = Objective(teacher_weights="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))
RUNS: dict[str, dict[str, Any]] = {
    "live": {"batch_size": 4},
    "lora": {"lora": LoraConfig(r=2, alpha=4)},
    "ema": {"objective": Objective(teacher_weights="ema"), "teacher": TeacherConfig(ema_decay=0.5)},
    "base": {"objective": BASE},
    "decoded": {"data": DataConfig(targets="decoded", max_decoded=6)},
    "on_policy": {"data": DataConfig(targets="on_policy", max_decoded=6, refresh_steps=3, temperature=1.0)},
}
TRAIN_ALL = """
import sys
from pathlib import Path
from remind.alignment.run_folder import read_config
from remind.alignment.trainer import train
for folder in sorted(Path(sys.argv[1]).glob("*/two-config")):
    train(read_config(folder))
import os
print(f"rank {os.environ['RANK']} is through", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_runs_on_two_processes_are_those_on_one(runs: Any, states: Path, tmp_path: Path, two_processes: Any) -> None:
    """Unequal answers, and batches that leave a process with fewer samples than the other, or with none."""
    common = {"batch_size": 5, "gradient_accumulation": 2, "save_every": 1, "keep_last": 9, "max_steps": 4}
    for name, settings in RUNS.items():
        cfg = runs.config(states, tmp_path / name / "one", **{**common, **settings})
        train(cfg)
        (tmp_path / name / "two-config").mkdir()
        text = yaml.safe_dump(as_dict(replace(cfg, out=str(tmp_path / name / "two"))))
        (tmp_path / name / "two-config" / CONFIG).write_text(text)
    two_processes(TRAIN_ALL, str(tmp_path))
    for name in RUNS:
        one, two = tmp_path / name / "one", tmp_path / name / "two"
        # after one step the first moment is a tenth of the gradient
        gradient, other = (runs.weights(run, 1, "optimizer") for run in (one, two))
        for key in gradient:
            if key.startswith("exp_avg/"):
                assert relative(other[key], gradient[key]) < 2e-6, (name, key)
        # AdamW divides by the moments, which blows up the last digits of gradients near 0
        for file in ("model", "ema") if name == "ema" else ("model",):
            for key, value in runs.weights(one, 4, file).items():
                assert relative(runs.weights(two, 4, file)[key], value) < 1e-4, (name, file, key)
        for row, same in zip(runs.timeless(one), runs.timeless(two), strict=True):
            assert same.keys() == row.keys()
            if row["kind"] == "train":
                for key in ("total", "grad_norm"):
                    assert same[key] == pytest.approx(row[key], rel=1e-6 if row["step"] == 1 else 1e-3)


@pytest.mark.slow
def test_the_shipped_config_trains_in_bfloat16_under_the_shipped_launcher(
    runs: Any, states: Path, tmp_path: Path
) -> None:
    launcher = yaml.safe_load((runs.ROOT / "configs/accelerate/fsdp2_bf16_2gpu.yaml").read_text())
    # as accelerate tells its processes
    told = {"ACCELERATE_USE_FSDP": "true", "OMP_NUM_THREADS": "1"}
    told |= {key.upper(): str(value) for key, value in launcher["fsdp_config"].items()}
    words = ["--config", str(runs.ROOT / "configs/paper/pra_full.yaml"), "--model", "nano-untrained"]
    words += ["--states", str(states), "--out", str(tmp_path / "run"), "--trainer.max_steps", "2"]
    words += ["--trainer.save_every", "1", "--trainer.keep_last", "2", "--data.unlabelled", "skip"]
    process = runs.start(parse(runs.TrainConfig, "", words), processes=launcher["num_processes"], **told)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    first, second = (runs.weights(tmp_path / "run", step) for step in (1, 2))
    assert {value.dtype for value in second.values()} == {torch.bfloat16}
    start = dict(load_backbone("nano-untrained").model.bfloat16().named_parameters())
    # at a rate of a hundred-thousandth, in bfloat16
    for before, after in ((start, first), (first, second)):
        moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
        assert len(moved) > len(after) / 2
    moments = runs.weights(tmp_path / "run", 2, "optimizer")
    assert {value.dtype for value in moments.values()} == {torch.int8, torch.uint8, torch.float32}
