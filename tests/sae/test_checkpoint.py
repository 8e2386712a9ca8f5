"""A run that is interrupted, killed or spread over processes ends as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file
from torch import Tensor

from sae import ActivationError, ConfigError, FormatError
from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch
from sae.trainer import Checkpoints, SAETrainConfig, Trained, train

CONFIG = SAETrainConfig(
    d_sae=64, k=4, batch_size=32, steps=60, lr=3e-3, log_every=7, init_tokens=64, dead_tokens=300, decay_share=0.2
)

#: Tokens of a world that fits the store (resident) or does not.
SIZES = {"resident": 20, "streamed": 90}


def world(count: int, start: int = 0) -> Iterator[TokenBatch]:
    for number in range(start, count):
        generator = torch.Generator().manual_seed(number)
        h = torch.randn(17, 12, generator=generator)
        yield TokenBatch(
            {2: h, 5: 3 * h.flip(0) + 1}, torch.zeros(17, dtype=torch.bool), *[torch.arange(17)] * 2, number
        )


def buffer(count: int) -> ShuffleBuffer:
    return ShuffleBuffer(lambda start: world(count, start), 32, 500, seed=1, epochs=None, drop_last=True)


def run(source: Iterator[object], folder: Path, config: SAETrainConfig = CONFIG) -> Trained:
    return train(source, config, metrics=folder / "metrics.jsonl", checkpoints=Checkpoints(folder / "at", 10))


def assert_same(one: Trained, other: Trained) -> None:
    assert (one.steps, one.tokens, one.skipped) == (other.steps, other.tokens, other.skipped)
    assert one.figures == other.figures
    for layer, coder in one.coders.items():
        for name, parameter in coder.named_parameters():
            assert torch.equal(parameter, getattr(other.coders[layer], name)), (layer, name)


class Interrupted(Exception):
    pass


class Broken(Iterator[object]):
    """A source that stops working after so many batches; with a state if what it wraps has one."""

    def __init__(self, source: Iterator[object], after: int) -> None:
        self.source, self.left = source, after
        for name in ("state_dict", "load_state_dict"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __next__(self) -> object:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return next(self.source)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("after", [3, 31, 59])
def test_an_interrupted_run_ends_with_the_same_bits(size: str, after: int, tmp_path: Path) -> None:
    count = SIZES[size]
    whole = run(buffer(count), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(Broken(buffer(count), after), tmp_path / "cut")
    # a second interruption, after the resume
    with pytest.raises(Interrupted):
        run(Broken(buffer(count), 8), tmp_path / "cut")
    assert_same(whole, run(buffer(count), tmp_path / "cut"))
    for name in ("metrics.jsonl",):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(list((tmp_path / "cut" / "at").glob("step-*"))) == 1


def test_a_source_without_a_state_is_drawn_again(tmp_path: Path) -> None:
    def plain() -> Iterator[dict[int, Tensor]]:
        for batch in world(200):
            h = batch.activations
            if batch.batch == 13:
                h = {layer: states / 0 for layer, states in h.items()}
            yield h

    config = SAETrainConfig(**{**vars(CONFIG), "skip_nonfinite": True})
    whole = run(plain(), tmp_path / "whole", config)
    assert whole.skipped == 1
    with pytest.raises(Interrupted):
        run(Broken(plain(), 37), tmp_path / "cut", config)
    assert_same(whole, run(plain(), tmp_path / "cut", config))


def test_another_configuration_or_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(Broken(buffer(90), 25), tmp_path)
    [step] = (tmp_path / "at").glob("step-*")
    with pytest.raises(ConfigError, match=r"another lr \(0.003\)"):
        run(buffer(90), tmp_path, SAETrainConfig(**{**vars(CONFIG), "lr": 1e-3}))
    weights = step / "layer_05.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="layer_05"):
        run(buffer(90), tmp_path)
    weights.write_bytes(whole)
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps({**state, "processes": 2}))
    with pytest.raises(ConfigError, match="2 processes, not 1"):
        run(buffer(90), tmp_path)
    del state["drawn"]
    (step / "state.json").write_text(json.dumps(state))
    with pytest.raises(FormatError, match="not a checkpoint of this version"):
        run(buffer(90), tmp_path)
    (tmp_path / "at" / "latest.json").write_text('{"folder": "../../etc"}')
    with pytest.raises(FormatError, match="names no checkpoint"):
        run(buffer(90), tmp_path)


def test_a_diverged_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    def loud() -> Iterator[dict[int, Tensor]]:
        for batch in world(200):
            yield {layer: h * (1e30 if batch.batch == 14 else 1) for layer, h in batch.activations.items()}

    with pytest.raises(ActivationError, match="layer 2: not finite after step 20"):
        run(loud(), tmp_path)
    assert [path.name for path in (tmp_path / "at").glob("step-*")] == ["step-00000010"]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import CONFIG, SIZES, buffer, run
from safetensors.torch import save_file
import torch
torch.set_num_threads(1)
folder = Path(sys.argv[2])
done = run(buffer(SIZES[sys.argv[3]]), folder)
weights = {f"{layer}/{name}": p for layer, coder in done.coders.items() for name, p in coder.named_parameters()}
save_file(weights, folder / "weights.safetensors")
"""


def _process(folder: Path, size: str) -> Forked:
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT)
    return Forked(script, Path(__file__).parent, folder, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_killed_runs_end_with_the_same_bits(size: str, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    whole = run(buffer(SIZES[size]), tmp_path / "whole")
    expected = {f"{layer}/{name}": p for layer, coder in whole.coders.items() for name, p in coder.named_parameters()}
    kills = int(os.environ.get("REMIND_KILLS", "3"))
    draw = random.Random(size)
    done = 0
    while done < kills:
        process = _process(tmp_path / "killed", size)
        # once it trains: anywhere between two checkpoints, or while one is written
        log = tmp_path / "killed" / "metrics.jsonl"
        before = log.stat().st_size if log.exists() else 0
        while process.poll() is None and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:  # it was through before the signal came
            for path in (tmp_path / "killed").glob("**/*"):
                if path.is_file():
                    path.unlink()
            continue
        done += 1
    process = _process(tmp_path / "killed", size)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    found = load_file(tmp_path / "killed" / "weights.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]


TWO = """
import os
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from accelerate import Accelerator
from safetensors.torch import save_file
from test_checkpoint import TWICE, parts
from sae.trainer import Checkpoints, train
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
rank = accelerator.process_index
folder = Path(sys.argv[2])
done = train(parts(rank), TWICE, metrics=folder / "metrics.jsonl", accelerator=accelerator,
             checkpoints=Checkpoints(folder / "at", 10))
weights = {f"{layer}/{name}": p for layer, coder in done.coders.items() for name, p in coder.named_parameters()}
save_file(weights, folder / f"weights-{rank}.safetensors")
accelerator.wait_for_everyone()
print(f"rank {rank} is through", flush=True)
os._exit(0)
"""
TWICE = SAETrainConfig(
    **{**vars(CONFIG), "dtype": "float64", "normalise": "centre_scale", "aux_stride": 2, "eps": 1e-6}
)


def parts(rank: int | None) -> Iterator[dict[int, Tensor]]:
    """Batches of 32 and their first or second half; one of them cannot be used, by one process's half alone."""
    for number in range(100):
        h = torch.randn(32, 12, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        rows = slice(None) if rank is None else slice(16 * rank, 16 * (rank + 1))
        yield {4: h[rows] ** 3, 1: h[rows] + 2}


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    one = train(parts(None), TWICE, metrics=tmp_path / "one.jsonl")
    script = tmp_path / "script.py"
    script.write_text(TWO)
    process = Forked(script, Path(__file__).parent, tmp_path, processes=2)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]
    first, second = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1))
    for layer, coder in one.coders.items():
        for name, parameter in coder.named_parameters():
            assert torch.equal(first[f"{layer}/{name}"], second[f"{layer}/{name}"])
            torch.testing.assert_close(first[f"{layer}/{name}"], parameter.detach(), rtol=1e-7, atol=1e-9)
    rows = [
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one.jsonl", "metrics.jsonl")
    ]
    assert any(row["aux"] > 0 for row in rows[0])
    for alone, together in zip(*rows, strict=True):
        assert together == pytest.approx(alone, rel=1e-7)
