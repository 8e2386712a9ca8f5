"""Training: what it learns and refuses; a run spread over processes ends as one that was not.

Run as a script, this file is one of two processes.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae import ActivationError, ConfigError, FormatError, ShapeError
from sae.trainer import SAETrainConfig, Trained, train

SMALL = {"d_sae": 64, "k": 4, "batch_size": 256, "lr": 3e-3, "warmup_steps": 10, "log_every": 20}


def sparse_world(seed: int, batches: int) -> Iterator[dict[int, Tensor]]:
    """Sums of 3 of 48 fixed directions in 24 dimensions, shifted; layer 7 is layer 3 in other units."""
    directions = torch.nn.functional.normalize(torch.randn(48, 24, generator=torch.Generator().manual_seed(99)), dim=1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        which = torch.rand(256, 48, generator=generator).argsort(1)[:, :3]
        z = torch.zeros(256, 48).scatter_(1, which, torch.rand(256, 3, generator=generator) + 0.5)
        yield {3: z @ directions + 2.0, 7: 40 * (z @ directions + 2.0)}


def test_it_learns_and_takes_raw_states_in_any_units() -> None:
    trained = train(sparse_world(0, 350), SAETrainConfig(steps=300, decay_share=0.3, dead_tokens=20_000, **SMALL))
    [fresh] = sparse_world(1, 1)
    for layer, coder in trained.coders.items():
        h = fresh[layer]
        assert float((coder(h) - h).square().sum() / (h - h.mean(0)).square().sum()) < 0.15


def test_one_step_equals_dense_adam_in_float64() -> None:
    batch = next(sparse_world(0, 1))[3]
    # a large epsilon, since with a small one Adam's first step depends on the sign of rounding errors
    settings = {**SMALL, "steps": 1, "dtype": "float64", "normalise": "centre_scale", "b_dec_init": "mean", "eps": 1e-4}
    start = train([{3: batch}], SAETrainConfig(**{**settings, "lr": 1e-300})).coders[3]
    got = train([{3: batch}], SAETrainConfig(**settings)).coders[3]
    h = batch.double()
    mean = h.mean(0)
    scale = math.sqrt(24) / (h - mean).norm(dim=1).mean()
    x = (h - mean) * scale
    # back from raw to training units
    p = {"W_enc": start.W_enc / scale, "W_dec": start.W_dec * scale, "b_dec": (start.b_dec - mean) * scale}
    p = {name: value.detach().clone().requires_grad_(True) for name, value in {**p, "b_enc": start.b_enc}.items()}
    pre = (x - p["b_dec"]) @ p["W_enc"] + p["b_enc"]
    values, indices = pre.topk(4)
    output = torch.zeros_like(pre).scatter(1, indices, values.relu()) @ p["W_dec"] + p["b_dec"]
    ((x - output).square().sum(1).mean() / (x - x.mean(0)).square().sum(1).mean()).backward()
    with torch.no_grad():
        for name, value in p.items():
            gradient = value.grad
            if name == "W_dec":
                gradient = gradient - (gradient * value).sum(1, keepdim=True) * value
            # Adam's first step with bias correction; warm-up gives a tenth of the rate
            value -= 3e-4 * gradient / (gradient.abs() + 1e-4)
        p["W_dec"] /= p["W_dec"].norm(dim=1, keepdim=True)
    expected = {**p, "W_enc": p["W_enc"] * scale, "W_dec": p["W_dec"] / scale, "b_dec": p["b_dec"] / scale + mean}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name), value.detach(), rtol=1e-9, atol=1e-9, msg=name)


def test_batches_that_cannot_be_used() -> None:
    [good], broken = sparse_world(0, 1), list(sparse_world(0, 4))
    broken[2][7][5, 1] = math.nan
    for batches, error, message in (
        ([good, {3: good[3], 7: good[7][:, :5]}], ShapeError, "batch 1, layer 7"),
        ([{3: torch.ones(256, 24)}], ActivationError, "all equal"),
        (broken, ActivationError, "batch 2, layer 7"),
    ):
        with pytest.raises(error, match=message):
            train(batches, SAETrainConfig(steps=3, init_tokens=256, **SMALL))


CONFIG = SAETrainConfig(d_sae=64, k=4, batch_size=32, init_tokens=64, dead_tokens=300, steps=60, lr=3e-3, log_every=7)


def parts(rank: int | None) -> Iterator[dict[int, Tensor]]:
    """Batches of 32, or their first 12 or last 20."""
    for number in range(100):
        h = torch.randn(32, 12, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        part = {None: h, 0: h[:12], 1: h[12:]}[rank]
        yield {4: part**3, 1: part + 2}


def test_a_checkpoint_is_of_one_configuration_and_not_of_divergence(tmp_path: Path) -> None:
    train(parts(None), CONFIG, folder=tmp_path, save_steps=10)
    with pytest.raises(ConfigError, match=r"checkpoint-50 is of a run with lr 0\.003, not 0\.001"):
        train(parts(None), replace(CONFIG, lr=1e-3), folder=tmp_path, save_steps=10)
    torch.save({"config": CONFIG}, tmp_path / "checkpoint-50" / "trainer.pt")
    with pytest.raises(FormatError, match="holds more than tensors"):
        train(parts(None), CONFIG, folder=tmp_path, save_steps=10)
    loud = (
        {n: h * (1e30 if number == 14 else 1) for n, h in batch.items()} for number, batch in enumerate(parts(None))
    )
    with pytest.raises(ActivationError, match="layer 4: not finite after step 20"):
        train(loud, CONFIG, folder=tmp_path / "loud", save_steps=10)
    assert [path.name for path in (tmp_path / "loud").glob("checkpoint-*")] == ["checkpoint-10"]


def weights_of(trained: Trained) -> dict[str, Tensor]:
    layers = ((layer, coder.named_parameters()) for layer, coder in trained.coders.items())
    return {f"{layer}/{name}": parameter.data for layer, parameters in layers for name, parameter in parameters}


TWICE = replace(CONFIG, dtype="float64", normalise="centre_scale", eps=1e-6)


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    one = train(parts(None), TWICE)
    process = Forked(Path(__file__), tmp_path, processes=2)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]
    first, second = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1))
    for name, expected in weights_of(one).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected, rtol=1e-7, atol=1e-9)


if __name__ == "__main__":
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator, folder = Accelerator(cpu=True), Path(sys.argv[1])
    rank = accelerator.process_index
    trained = train(parts(rank), TWICE, folder=folder, save_steps=10, accelerator=accelerator)
    save_file(weights_of(trained), folder / f"weights-{rank}.safetensors")
    accelerator.wait_for_everyone()
    os._exit(0)
