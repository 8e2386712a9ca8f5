"""Checkpoints: what comes back is what went in, and a damaged one is never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remind.alignment import checkpoint
from remind.alignment.config import OptimizerKind
from remind.alignment.model import trainable
from remind.alignment.optim import make_optimizer
from remind.core.errors import ModelError
from remind.core.files import read_json

CPU = torch.device("cpu")


def begin(make_model: Any, kind: OptimizerKind = "adamw", seed: int = 4) -> tuple[Any, torch.optim.Optimizer]:
    model = trainable(make_model(dtype=torch.float32 if kind == "adamw" else torch.bfloat16), None)
    return model, make_optimizer(model, kind, 1e-2, 0.1, seed=seed)


def trained(make_model: Any, steps: int = 1, kind: OptimizerKind = "adamw") -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = begin(make_model, kind)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, 80, (1, 6), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(run: Path, step: int, model: Any, optimizer: Any) -> Path:
    folder = checkpoint.folder_of(run, step)
    checkpoint.save(folder, step, model, optimizer, checkpoint.random_state(CPU)[None], {"best": None})
    return folder


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_model_optimizer_and_generators_come_back(tmp_path: Path, make_model: Any, kind: OptimizerKind) -> None:
    model, optimizer = trained(make_model, 3, kind)
    torch.manual_seed(5)
    folder = save(tmp_path, 3, model, optimizer)
    expected = torch.rand(4)

    again, fresh = begin(make_model, kind)
    checkpoint.restore_model(folder, again)
    checkpoint.restore_optimizer(folder, again, fresh)
    checkpoint.restore_random(folder, 0, CPU)
    assert torch.equal(torch.rand(4), expected)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(again, fresh, seed)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    left, right = (o.state_dict()["state"] for o in (optimizer, fresh))
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert state.keys() == right[number].keys()
        for key, value in state.items():
            assert value.dtype == right[number][key].dtype
            assert torch.equal(value, right[number][key])
    assert checkpoint.read_state(folder)["step"] == 3


def test_a_checkpoint_holds_what_is_trained_and_no_pickle(tmp_path: Path, make_model: Any) -> None:
    model, optimizer = trained(make_model)
    folder = save(tmp_path, 1, model, optimizer)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert set(read_json(folder / "checksums.json")) == {p.name for p in folder.iterdir()} - {"checksums.json"}
    names = load_file(folder / "model.safetensors").keys()
    assert names == checkpoint.trained_parameters(model).keys()
    assert not any("visual" in name for name in names)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        checkpoint.restore_model(folder, trainable(make_model(tie=True), None))
    # one bit
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        checkpoint.verify(folder)
    with pytest.raises(ModelError, match="every checkpoint"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "random.safetensors"])
def test_a_truncated_newest_falls_back_and_says_so(
    tmp_path: Path, make_model: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained(make_model)
    one, two = save(tmp_path, 1, model, optimizer), save(tmp_path, 2, model, optimizer)
    assert checkpoint.newest(tmp_path) == two
    content = (two / name).read_bytes()
    (two / name).write_bytes(content[: len(content) // 2])
    assert checkpoint.newest(tmp_path) == one
    assert f"step-00000002/{name}" in capsys.readouterr().err
    (two / name).unlink()
    assert checkpoint.newest(tmp_path) == one


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for number in range(1, 6):
        checkpoint.folder_of(tmp_path, number).mkdir(parents=True)
    checkpoint.prune(tmp_path, keep=2, best=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [f"step-0000000{n}" for n in (2, 4, 5)]
