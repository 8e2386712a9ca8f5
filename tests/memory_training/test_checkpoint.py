"""Checkpoints of `remind train-memory`: what comes back is what went in, and a damaged one is never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from remind.core.errors import ModelError
from remind.memory_training import checkpoint


def begin(policy: Path) -> tuple[Any, torch.optim.AdamW]:
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.model.layers[0].requires_grad_(False)
    return model, checkpoint.make_optimizer(model, 1e-2, 0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_goes_on_with_the_same_bits(policy: Path, tmp_path: Path) -> None:
    model, optimizer = begin(policy)
    for seed in range(3):
        step(model, optimizer, seed)
    folder = checkpoint.save(tmp_path, 3, model, optimizer)
    assert (checkpoint.newest(tmp_path), checkpoint.step_of(folder), checkpoint.step_of(None)) == (folder, 3, 0)
    assert not any(name.startswith("model.layers.0") for name in load_file(folder / "model.safetensors"))
    again, fresh = begin(policy)
    checkpoint.restore(folder, again, fresh)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(again, fresh, seed)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        before, after = optimizer.state.get(one, {}), fresh.state.get(other, {})
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_what_does_not_fit_is_refused(policy: Path, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, *begin(policy))
    weights = load_file(folder / "model.safetensors")
    for change, message in (
        ({"odd": torch.ones(1)}, "differs is odd"),
        ({"model.norm.weight": torch.ones(1)}, "shape"),
    ):
        save_file(weights | change, folder / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            checkpoint.restore(folder, *begin(policy))
    torch.save(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        checkpoint.restore(folder, *begin(policy))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checksums.json"])
def test_damaged_ones_are_passed_over(
    policy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.newest(tmp_path) is None
    (tmp_path / "checkpoints" / ".step-00000001.0a_b2c3d.tmp").mkdir(parents=True)
    _, one, two = (checkpoint.save(tmp_path, number, *begin(policy), keep=2) for number in (1, 2, 3))
    assert sorted((tmp_path / "checkpoints").iterdir()) == [one, two]
    content = (two / name).read_bytes()
    (two / name).write_bytes(content[:-3])
    assert checkpoint.newest(tmp_path) == one
    assert f"{two / name}" in capsys.readouterr().err
    (two / name).unlink()
    assert checkpoint.newest(tmp_path) == one
    (one / name).unlink()
    with pytest.raises(ModelError, match="every checkpoint is damaged"):
        checkpoint.newest(tmp_path)


def test_matrices_decay_alone(policy: Path) -> None:
    model, optimizer = begin(policy)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[one] for one in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]
    assert all(("norm" in name or "embed" in name) == (name in plain) for name in decayed | plain)
    model.lm_head.weight = model.model.embed_tokens.weight
    decayed_now = checkpoint.make_optimizer(model, 1e-2, 0.1).param_groups[0]["params"]
    assert len(decayed_now) == len(decayed) - 1


def test_the_rate_rises_then_falls() -> None:
    rates = [checkpoint.rate(step, 100, 0.1, "cosine") for step in range(100)]
    assert rates[:11] == pytest.approx([*(k / 10 for k in range(1, 11)), 1.0])
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(set(rates[10:]), reverse=True)
    assert 0 < rates[-1] < 0.01
    assert {checkpoint.rate(step, 100, 0.0, "constant") for step in range(100)} == {1.0}
    assert checkpoint.rate(0, 1, 1.0, "cosine") == 1.0
