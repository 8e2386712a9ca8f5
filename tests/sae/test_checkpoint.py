"""A run that is interrupted, killed or spread over processes ends as one that was not.

Run as a script, this file is the process that a test kills, or one of two.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae import ActivationError, ConfigError, FormatError
from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch
from sae.trainer import Checkpoints, SAETrainConfig, Trained, train

SCHEDULE: dict[str, Any] = {"steps": 60, "lr": 3e-3, "decay_share": 0.2, "log_every": 7, "skip_nonfinite": True}
CONFIG = SAETrainConfig(d_sae=64, k=4, batch_size=32, init_tokens=64, dead_tokens=300, **SCHEDULE)

#: Batches of a world that fits the store (resident) or does not.
SIZES = {"resident": 20, "streamed": 90}


def world(count: int, start: int = 0) -> Iterator[TokenBatch]:
    for number in range(start, count):
        generator = torch.Generator().manual_seed(number)
        h, rows = torch.randn(17, 12, generator=generator), torch.arange(17)
        yield TokenBatch({2: h, 5: 3 * h.flip(0) + 1}, rows < 0, rows, rows, number)


def buffer(count: int) -> ShuffleBuffer:
    return ShuffleBuffer(lambda start: world(count, start), 32, 500, seed=1, epochs=None, drop_last=True)


def run(source: Iterator[object], folder: Path, config: SAETrainConfig = CONFIG) -> Trained:
    return train(source, config, metrics=folder / "metrics.jsonl", checkpoints=Checkpoints(folder / "at", 10))


def assert_same(one: Trained, other: Trained) -> None:
    assert (one.steps, one.tokens, one.skipped) == (other.steps, other.tokens, other.skipped)
    assert one.figures == other.figures
    weights = weights_of(other)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(one).items())


class Interrupted(Exception):
    pass


class Broken(Iterator[object]):
    """A source that stops working after so many batches; with a state if what it wraps has one."""

    def __init__(self, source: Iterator[object], after: int) -> None:
        self.source, self.left = source, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> object:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return next(self.source)


def plain() -> Iterator[dict[int, Tensor]]:
    """A source without a state, of which one batch is to be skipped."""
    for batch in world(200):
        yield {layer: h / (batch.batch != 13) for layer, h in batch.activations.items()}


@pytest.mark.parametrize("size", [*SIZES, "plain"])
@pytest.mark.parametrize("after", [3, 31])
def test_an_interrupted_run_ends_with_the_same_bits(size: str, after: int, tmp_path: Path) -> None:
    def source() -> Iterator[object]:
        return plain() if size == "plain" else buffer(SIZES[size])

    whole = run(source(), tmp_path / "whole")
    assert whole.skipped == (size == "plain")
    # a second interruption, after the resume; a source without a state is drawn again from its start
    for left in (after, after + 12 if size == "plain" else 8):
        with pytest.raises(Interrupted):
            run(Broken(source(), left), tmp_path / "cut")
    assert_same(whole, run(source(), tmp_path / "cut"))
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert len(list((tmp_path / "cut" / "at").glob("step-*"))) == 1


def test_another_configuration_or_damage_is_refused(tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            run(buffer(90), tmp_path, SAETrainConfig(**{**vars(CONFIG), **changes}))

    with pytest.raises(Interrupted):
        run(Broken(buffer(90), 25), tmp_path)
    [step] = (tmp_path / "at").glob("step-*")
    refused(ConfigError, r"another lr \(0.003\)", lr=1e-3)
    weights = step / "layer_05.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(FormatError, "layer_05")
    tensors = load_file(step / "layer_02.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "b_dec"}, weights)
    refused(FormatError, "does not match this configuration")
    weights.write_bytes(whole)
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps({**state, "processes": 2}))
    refused(ConfigError, "2 processes, not 1")
    del state["drawn"]
    (step / "state.json").write_text(json.dumps(state))
    refused(FormatError, "not a checkpoint of this version")
    (tmp_path / "at" / "latest.json").write_text('{"folder": "../../etc"}')
    refused(FormatError, "names no checkpoint")


def test_a_diverged_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    def loud() -> Iterator[dict[int, Tensor]]:
        for batch in world(200):
            yield {layer: h * (1e30 if batch.batch == 14 else 1) for layer, h in batch.activations.items()}

    with pytest.raises(ActivationError, match="layer 2: not finite after step 20"):
        run(loud(), tmp_path)
    assert [path.name for path in (tmp_path / "at").glob("step-*")] == ["step-00000010"]


def weights_of(trained: Trained) -> dict[str, Tensor]:
    layers = ((layer, coder.named_parameters()) for layer, coder in trained.coders.items())
    return {f"{layer}/{name}": parameter.data for layer, parameters in layers for name, parameter in parameters}


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    size = "streamed"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killed.mkdir()
    expected = weights_of(run(buffer(SIZES[size]), whole))
    log, draw, kills = killed / "metrics.jsonl", random.Random(size), 0
    while kills < int(os.environ.get("REMIND_KILLS", "2")):
        process = Forked(Path(__file__), "one", killed, size)
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
    process = Forked(Path(__file__), "one", killed, size)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    weights = load_file(killed / "weights.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert log.read_text() == (whole / "metrics.jsonl").read_text()


TWO: dict[str, Any] = {"dtype": "float64", "normalise": "centre_scale", "aux_stride": 2, "eps": 1e-6}
TWICE = SAETrainConfig(**{**vars(CONFIG), **TWO})


def parts(rank: int | None) -> Iterator[dict[int, Tensor]]:
    """Batches of 32, or their first or second half; one of them is skipped, for values in the first half alone."""
    for number in range(100):
        h = torch.randn(32, 12, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if number == 20:
            h[3, 3] = torch.nan
        rows = slice(None) if rank is None else slice(16 * rank, 16 * (rank + 1))
        yield {4: h[rows] ** 3, 1: h[rows] + 2}


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    one = train(parts(None), TWICE, metrics=tmp_path / "one.jsonl")
    assert one.skipped == 1
    process = Forked(Path(__file__), "two", tmp_path, processes=2)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]
    first, second = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1))
    for name, expected in weights_of(one).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected, rtol=1e-7, atol=1e-9)
    logs = [(tmp_path / name).read_text().splitlines() for name in ("one.jsonl", "metrics.jsonl")]
    rows = [(json.loads(alone), json.loads(together)) for alone, together in zip(*logs, strict=True)]
    assert any(alone["aux"] > 0 for alone, _ in rows)
    for alone, together in rows:
        assert together == pytest.approx(alone, rel=1e-7)


def one_process(folder: Path, size: str) -> None:
    save_file(weights_of(run(buffer(SIZES[size]), folder)), folder / "weights.safetensors")


def one_of_two(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank, at = accelerator.process_index, Checkpoints(folder / "at", 10)
    trained = train(parts(rank), TWICE, metrics=folder / "metrics.jsonl", accelerator=accelerator, checkpoints=at)
    save_file(weights_of(trained), folder / f"weights-{rank}.safetensors")
    accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"one": one_process, "two": one_of_two}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
