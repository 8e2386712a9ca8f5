"""Training: what it learns and refuses; a run interrupted, killed or spread over processes ends as one that was not.

Run as a script, this file is the process that a test kills, or one of two.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from sae import ActivationError, ConfigError, FormatError, LayerError, ShapeError, TopKSAE
from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch
from sae.step import geometric_median
from sae.trainer import SAETrainConfig, Trained, Trainer, train

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
    trainer = Trainer(config, "cpu")
    batches = [{3: batch[3]} for batch in sparse_world(0, 100)]
    trainer.start(batches[0])
    one = trainer.layers[3]
    with torch.no_grad():
        one.coder.W_enc[:, 32:] *= 0.05
    for batch in batches:
        trainer.step(batch)
    return float((one.silent[32:] < 2048).float().mean())


def test_dead_features_come_back_with_the_auxiliary_term() -> None:
    assert revived(0.0) < 0.1
    assert revived(1 / 32) > 0.8


class Recorder(TrainerCallback):
    """What callbacks are told; may ask for a stop."""

    def __init__(self, stop: int = 0) -> None:
        self.steps, self.logged, self.events, self.stop = list[int](), dict[int, Any](), list[str](), stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("begin")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged[state.global_step] = kwargs["logs"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert set(kwargs["model"]) == {3, 7}
        self.steps.append(state.global_step)
        control.should_training_stop = control.should_save = state.global_step == self.stop

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"saved {state.global_step} of {state.max_steps}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("end")


def test_metrics_callbacks_and_trackers(tmp_path: Path) -> None:
    tracked: dict[int, dict[str, float]] = {}
    recorder, config = Recorder(), SAETrainConfig(tokens=45 * 256 - 1, **SMALL)
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    accelerator.log = lambda values, step: tracked.update({step: values})
    folder = tmp_path / "deep"
    result = train(sparse_world(0, 50), config, folder=folder, accelerator=accelerator, callbacks=[recorder])
    assert (result.steps, result.tokens) == (45, 45 * 256)
    assert recorder.steps == list(range(1, 46))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["layer"]) for row in rows] == [(s, layer) for s in (1, 20, 40, 45) for layer in (3, 7)]
    assert set(rows[0]) == {"step", "tokens", "layer", "loss", "aux", "fvu", "l0", "dead", "lr"}
    assert rows[0]["fvu"] > rows[-1]["fvu"]
    assert recorder.logged == tracked
    assert all(tracked[row["step"]][f"layer_{row['layer']:02d}/fvu"] == row["fvu"] for row in rows)
    assert train(sparse_world(0, 3), SAETrainConfig(steps=10, **SMALL)).steps == 3
    # a callback ends a run early, with a checkpoint from which it goes on
    early = Recorder(stop=17)
    stopped = train(sparse_world(0, 50), config, folder=tmp_path / "early", save_steps=1000, callbacks=[early])
    assert (stopped.steps, early.events) == (17, ["begin", "saved 17 of 45", "end"])
    again = train(sparse_world(0, 50), config, folder=tmp_path / "early", save_steps=1000)
    assert torch.equal(again.coders[3].W_dec, result.coders[3].W_dec)


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


SCHEDULE: dict[str, Any] = {"steps": 60, "lr": 3e-3, "decay_share": 0.2, "log_every": 7, "skip_nonfinite": True}
CONFIG = SAETrainConfig(d_sae=64, k=4, batch_size=32, init_tokens=64, dead_tokens=300, **SCHEDULE)
#: Batches of a world that fits the store (resident) or does not.
COUNTS = {"resident": 20, "streamed": 90}


def world(count: int, start: int = 0) -> Iterator[TokenBatch]:
    for number in range(start, count):
        generator = torch.Generator().manual_seed(number)
        h, rows = torch.randn(17, 12, generator=generator), torch.arange(17)
        yield TokenBatch({2: h, 5: 3 * h.flip(0) + 1}, rows < 0, rows, rows, number)


def source_of(kind: str) -> Iterator[Any]:
    """A buffer; or (plain) batches without a state, of which one is to be skipped."""
    if kind == "plain":
        return ({n: h / (b.batch != 13) for n, h in b.activations.items()} for b in world(200))
    return ShuffleBuffer(lambda start: world(COUNTS[kind], start), 32, 500, seed=1)


def run(source: Iterator[Any], folder: Path, config: SAETrainConfig = CONFIG) -> Trained:
    return train(source, config, folder=folder, save_steps=10)


def weights_of(trained: Trained) -> dict[str, Tensor]:
    layers = ((layer, coder.named_parameters()) for layer, coder in trained.coders.items())
    return {f"{layer}/{name}": parameter.data for layer, parameters in layers for name, parameter in parameters}


class Interrupted(Exception):
    pass


class Broken(Iterator[Any]):
    """A source that stops working after so many batches; with a state if what it wraps has one."""

    def __init__(self, source: Iterator[Any], after: int) -> None:
        self.source, self.left = source, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return next(self.source)


@pytest.mark.parametrize(("kind", "after"), [("resident", 31), ("streamed", 31), ("plain", 31), ("streamed", 3)])
def test_an_interrupted_run_ends_with_the_same_bits(kind: str, after: int, tmp_path: Path) -> None:
    whole = run(source_of(kind), tmp_path / "whole")
    assert whole.skipped == (kind == "plain")
    # a second interruption, after the resume; a source without a state is drawn again from its start
    for left in (after, after + 12 if kind == "plain" else 8):
        with pytest.raises(Interrupted):
            run(Broken(source_of(kind), left), tmp_path / "cut")
    cut = run(source_of(kind), tmp_path / "cut")
    assert (cut.steps, cut.tokens, cut.skipped, cut.figures) == (60, whole.tokens, whole.skipped, whole.figures)
    assert all(torch.equal(value, weights_of(cut)[name]) for name, value in weights_of(whole).items())
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert len(list((tmp_path / "cut").glob("checkpoint-*"))) == 1


def test_another_configuration_or_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(Broken(source_of("streamed"), 25), tmp_path)
    state = tmp_path / "checkpoint-20" / "trainer.pt"

    def refused(error: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            run(source_of("streamed"), tmp_path, SAETrainConfig(**{**vars(CONFIG), **changes}))

    refused(ConfigError, r"checkpoint-20: from a run with another lr \(0.003\)", lr=1e-3)
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    refused(FormatError, "trainer.pt: cannot be read")
    torch.save({"config": CONFIG}, state)
    refused(FormatError, "holds more than tensors")
    torch.save({"config": {}}, state)
    refused(FormatError, "not a checkpoint of this version")


def test_a_diverged_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    loud = ({n: h * (1e30 if b.batch == 14 else 1) for n, h in b.activations.items()} for b in world(200))
    with pytest.raises(ActivationError, match="layer 2: not finite after step 20"):
        run(loud, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killed.mkdir()
    expected = weights_of(run(source_of("streamed"), whole))
    log, draw, kills = killed / "metrics.jsonl", random.Random(0), 0
    while kills < int(os.environ.get("REMIND_KILLS", "1")):
        process = Forked(Path(__file__), "one", killed)
        # once it trains: anywhere between two checkpoints, or while one is written
        before = log.stat().st_size if log.exists() else 0
        while process.poll() is None and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:  # it was through before the signal came
            shutil.rmtree(killed)
            killed.mkdir()
        else:
            kills += 1
    process = Forked(Path(__file__), "one", killed)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    weights = load_file(killed / "weights.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert log.read_text() == (whole / "metrics.jsonl").read_text()


TWO: dict[str, Any] = {"dtype": "float64", "normalise": "centre_scale", "aux_stride": 2, "eps": 1e-6}
TWICE = SAETrainConfig(**{**vars(CONFIG), **TWO})


def parts(rank: int | None) -> Iterator[dict[int, Tensor]]:
    """Batches of 32, or their first 12 or last 20; one of them is skipped, for values in the first part alone."""
    for number in range(100):
        h = torch.randn(32, 12, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if number == 20:
            h[3, 3] = torch.nan
        rows = {None: slice(None), 0: slice(12), 1: slice(12, None)}[rank]
        yield {4: h[rows] ** 3, 1: h[rows] + 2}


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    one = train(parts(None), TWICE, folder=tmp_path / "one")
    assert one.skipped == 1
    process = Forked(Path(__file__), "two", tmp_path, processes=2)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]
    first, second = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1))
    for name, expected in weights_of(one).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected, rtol=1e-7, atol=1e-9)
    logs = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (tmp_path / "one", tmp_path)]
    rows = [(json.loads(alone), json.loads(together)) for alone, together in zip(*logs, strict=True)]
    assert any(alone["aux"] > 0 for alone, _ in rows)
    for alone, together in rows:
        assert together == pytest.approx(alone, rel=1e-7)


def one_process(folder: Path) -> None:
    save_file(weights_of(run(source_of("streamed"), folder)), folder / "weights.safetensors")


def one_of_two(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank = accelerator.process_index
    trained = train(parts(rank), TWICE, folder=folder, save_steps=10, accelerator=accelerator)
    save_file(weights_of(trained), folder / f"weights-{rank}.safetensors")
    accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"one": one_process, "two": one_of_two}[sys.argv[1]](Path(sys.argv[2]))
