"""Training: what it learns, that it repeats, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ActivationError, ConfigError, LayerError, ShapeError, TopKSAE
from sae.step import geometric_median
from sae.trainer import SAETrainConfig, Trainer, train

SMALL = {"d_sae": 64, "k": 4, "batch_size": 256, "lr": 3e-3, "warmup_steps": 10, "log_every": 20}


def sparse_world(seed: int, batches: int, scale: float = 1.0) -> Iterator[dict[int, Tensor]]:
    """Sums of 3 of 48 fixed directions in 24 dimensions, shifted; layer 7 is layer 3 in other units."""
    directions = torch.nn.functional.normalize(torch.randn(48, 24, generator=torch.Generator().manual_seed(99)), dim=1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        z = torch.zeros(256, 48)
        which = torch.rand(256, 48, generator=generator).argsort(1)[:, :3]
        z.scatter_(1, which, torch.rand(256, 3, generator=generator) + 0.5)
        h = (z @ directions + 2.0) * scale
        yield {3: h, 7: 40 * h}


def fvu(coder: TopKSAE, h: Tensor) -> float:
    return float((coder(h) - h).square().sum() / (h - h.mean(0)).square().sum())


def test_it_learns_and_takes_raw_states_in_any_units() -> None:
    source = sparse_world(0, 350)
    trained = train(source, SAETrainConfig(steps=300, decay_share=0.3, dead_tokens=20_000, **SMALL))
    # no more batches are drawn than steps
    assert len(list(source)) == 50
    [fresh] = sparse_world(1, 1)
    for layer in (3, 7):
        assert fvu(trained.coders[layer], fresh[layer]) < 0.15
        assert trained.figures[layer]["l0"] == pytest.approx(4, abs=0.1)
        norms = trained.coders[layer].W_dec.norm(dim=1)
        torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=1e-5, atol=0)
        assert trained.coders[layer].W_enc.is_contiguous()
        assert not any(p.requires_grad for p in trained.coders[layer].parameters())
    start = train(sparse_world(0, 1), SAETrainConfig(steps=1, **{**SMALL, "lr": 1e-9}))
    assert fvu(start.coders[3], fresh[3]) > 0.25


def test_the_seed_fixes_every_bit_and_layers_do_not_touch_each_other() -> None:
    config = SAETrainConfig(steps=12, dead_tokens=512, **SMALL)
    first, second = train(sparse_world(0, 12), config), train(sparse_world(0, 12), config)
    alone = train(({7: batch[7]} for batch in sparse_world(0, 12)), config)
    other = train(sparse_world(0, 12), SAETrainConfig(steps=12, dead_tokens=512, seed=1, **SMALL))
    for name, parameter in first.coders[7].named_parameters():
        assert torch.equal(parameter, getattr(second.coders[7], name))
        assert torch.equal(parameter, getattr(alone.coders[7], name))
    assert not torch.equal(first.coders[7].W_dec, other.coders[7].W_dec)


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


def revived(aux_coefficient: float) -> float:
    """Share of 32 features, silenced at the start, that fire at the end."""
    config = SAETrainConfig(steps=100, aux_coefficient=aux_coefficient, dead_tokens=2048, **SMALL)
    trainer = Trainer(config, "cpu", None)
    batches = [{3: batch[3]} for batch in sparse_world(0, 100)]
    trainer.start(batches[0])
    one = trainer.state.layers[3]
    with torch.no_grad():
        one.coder.W_enc[:, 32:] *= 0.05
    for batch in batches:
        trainer.step(batch)
    return float((one.silent[32:] < 2048).float().mean())


def test_the_first_tokens_are_held_once() -> None:
    given = [{n: torch.randn(32, 8, generator=torch.Generator().manual_seed(n + s)) for n in (1, 2)} for s in (0, 9)]
    trainer = Trainer(SAETrainConfig(d_sae=16, k=2, steps=4, batch_size=32, init_tokens=64), "cpu")
    kept = trainer.begin(iter([dict(batch) for batch in given]))
    assert set(trainer.state.layers) == {1, 2}
    for number in (1, 2):
        first, second = (batch[number] for batch in kept)
        assert torch.equal(first, given[0][number])
        assert torch.equal(second, given[1][number])
        # parts of one block of memory, in which the coder was started
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_dead_features_come_back_with_the_auxiliary_term() -> None:
    assert revived(0.0) < 0.1
    assert revived(1 / 32) > 0.8


def test_metrics_progress_and_trackers(tmp_path: Path) -> None:
    calls: list[tuple[int, int, bool]] = []
    logged: dict[int, dict[str, float]] = {}
    path, config = tmp_path / "deep" / "metrics.jsonl", SAETrainConfig(tokens=45 * 256 - 1, **SMALL)
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    accelerator.log = lambda values, step: logged.update({step: values})
    options: dict[str, Any] = {"metrics": path, "accelerator": accelerator}
    options["progress"] = lambda done, total, figures: calls.append((done, total, bool(figures)))
    result = train(sparse_world(0, 50), config, **options)
    assert (result.steps, result.tokens) == (45, 45 * 256)
    assert calls == [(step, 45, step > 0) for step in range(46)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["layer"]) for row in rows] == [(s, layer) for s in (1, 20, 40, 45) for layer in (3, 7)]
    assert rows[-1]["tokens"] == 45 * 256
    assert set(rows[0]) == {"step", "tokens", "layer", "loss", "aux", "fvu", "l0", "dead", "lr"}
    assert rows[0]["fvu"] > rows[-1]["fvu"]
    assert list(logged) == [1, 20, 40, 45]
    assert all(logged[row["step"]][f"layer_{row['layer']:02d}/fvu"] == row["fvu"] for row in rows)
    assert train(sparse_world(0, 3), SAETrainConfig(steps=10, **SMALL)).steps == 3


def test_learning_rate_schedule() -> None:
    config = SAETrainConfig(steps=100, lr=1.0, warmup_steps=10, decay_share=0.2)
    rates = [config.rate(done) for done in (0, 9, 50, 80, 90, 99)]
    assert rates == pytest.approx([0.1, 1, 1, 1, 0.5, 0.05])


def test_values_that_are_not_finite() -> None:
    batches = list(sparse_world(0, 4))
    batches[2][7][5, 1] = math.nan
    with pytest.raises(ActivationError, match="batch 2, layer 7"):
        train(batches, SAETrainConfig(steps=4, init_tokens=256, **SMALL))
    skipped = train(batches, SAETrainConfig(steps=4, skip_nonfinite=True, **SMALL))
    assert (skipped.steps, skipped.skipped) == (3, 1)
    clean = train([batches[0], batches[1], batches[3]], SAETrainConfig(steps=4, **SMALL))
    assert torch.equal(skipped.coders[3].W_dec, clean.coders[3].W_dec)


def test_batches_that_cannot_be_used() -> None:
    [good] = sparse_world(0, 1)
    for batches, error, message in (
        ([], ActivationError, "there are no activations"),
        ([good, {3: good[3]}], LayerError, r"batch 1 holds layers \[3\]"),
        ([good, {3: good[3], 7: good[7][:, :5]}], ShapeError, "batch 1, layer 7"),
        ([{}], LayerError, "batch 0"),
        ([{3: torch.ones(256, 24)}], ActivationError, "all equal"),
    ):
        for init_tokens in (256, 10_000):
            with pytest.raises(error, match=message):
                train(batches, SAETrainConfig(steps=3, init_tokens=init_tokens, **SMALL))


@pytest.mark.parametrize("changes", [{"k": 0}, {"k": 5000}, {"lr": 0.0}, {"decay_share": 2.0}, {"steps": 0}])
def test_settings_out_of_range(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SAETrainConfig(**changes)  # type: ignore[arg-type]


def test_geometric_median_resists_an_outlier() -> None:
    torch.manual_seed(0)
    x = torch.randn(101, 3, dtype=torch.float64)
    x[0] = 1e6
    point = geometric_median(x)
    assert float(point.norm()) < 1
    # at the minimum the unit vectors towards the points balance
    pull = torch.nn.functional.normalize(x - point, dim=1).sum(0)
    assert float(pull.norm()) < 1e-2
