"""Runs that are told to stop, that run out of memory or disk, or whose trackers fail: nothing is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.metrics import METRICS, read_metrics
from remind.alignment.step import AlignmentModel
from remind.alignment.trainer import Trainer, train
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json
from remind.core.processes import Termination

# a signal from within, at a given line of the metrics: the same as one from outside, but always at the same place
ARRIVES = """
import os, signal
from remind.alignment.run_folder import RunFolder
record = RunFolder.record
def recorded(self, metrics):
    record(self, metrics)
    if (metrics["kind"], metrics["step"]) == {at} and os.environ.get("RANK", "0") == {rank}:
        os.kill(os.getpid(), signal.SIGTERM)
RunFolder.record = recorded
"""


@pytest.mark.slow
def test_sigterm_from_outside_ends_the_step_saves_and_goes_on_to_the_same_bits(
    runs: Any, run: Path, states: Path, tmp_path: Path
) -> None:
    cfg = runs.config(states, tmp_path / "r", save_every=100)
    # slow enough that the signal comes in the middle
    slow = "import time\nfrom remind.alignment.trainer import Trainer\nstep = Trainer.train_step\n"
    slow += "def slowly(self):\n    time.sleep(0.3)\n    return step(self)\nTrainer.train_step = slowly"
    process = runs.start(cfg, slow)
    log = tmp_path / "r" / METRICS
    while process.poll() is None and not (log.exists() and b'"step": 3' in log.read_bytes()):
        try:
            process.wait(0.02)
        except TimeoutExpired:
            continue
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143, errors
    newest = checkpoint.newest(tmp_path / "r")
    assert newest is not None
    done = checkpoint.read_state(newest)["step"]
    assert 3 <= done < 6
    assert f"stopped by SIGTERM at step {done} of 6" in errors
    train(replace(cfg, resume=True))
    runs.assert_identical(runs.weights(tmp_path / "r"), runs.weights(run))
    runs.assert_identical(runs.weights(tmp_path / "r", name="optimizer"), runs.weights(run, name="optimizer"))
    assert runs.timeless(tmp_path / "r") == runs.timeless(run)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_measurement_that_was_owed_is_made_up_for(
    runs: Any, run: Path, states: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM between a step and its held-out loss, or in the middle of that."""
    cfg = runs.config(states, tmp_path / "r", batch_size=2, max_steps=6, save_every=100)
    through = Trainer.run_passes

    def signalled(self: Trainer, *args: Any) -> dict[str, Tensor]:
        if trainer.step == 4 - (kind == "train") and (len(args) < 4) == (kind == "eval"):
            os.kill(os.getpid(), signal.SIGTERM)
        return through(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_passes", signalled)
        trainer = Trainer(cfg)
        trainer.fit()
    assert trainer.stopped
    assert trainer.step == 4
    assert max(row["step"] for row in read_metrics(tmp_path / "r") if row["kind"] == "eval") == 2
    train(replace(cfg, resume=True))
    other = train(replace(cfg, out=str(tmp_path / "whole")))
    assert runs.timeless(tmp_path / "r") == runs.timeless(other)
    assert read_json(tmp_path / "r" / "best.json") == read_json(other / "best.json")
    runs.assert_identical(runs.weights(tmp_path / "r"), runs.weights(other))


@pytest.mark.slow
def test_one_process_with_sigterm_stops_both(runs: Any, states: Path, tmp_path: Path) -> None:
    signals = ARRIVES.format(at=("train", 3), rank="'1'")
    cfg = runs.config(states, tmp_path / "r", save_every=100, eval_every=4)
    process = runs.start(cfg, signals, processes=2)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "r")] == ["step-00000004"]
    again = runs.start(replace(cfg, resume=True), processes=2)
    other = runs.start(replace(cfg, out=str(tmp_path / "whole")), processes=2)
    for process in (again, other):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
    runs.assert_identical(runs.weights(tmp_path / "r"), runs.weights(tmp_path / "whole"))
    assert runs.timeless(tmp_path / "r") == runs.timeless(tmp_path / "whole")


def test_sigterm_has_its_former_effect_afterwards() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with Termination() as termination:
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.requested
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")],
)
def test_out_of_memory_names_sizes_and_remedies(
    runs: Any, run: Path, states: Path, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = AlignmentModel.forward

    def full(self: AlignmentModel, batch: Any, *args: Any) -> Any:
        # with two of the three passes of a microbatch gone, some gradients are there already
        if trainer.step == 3 and torch.is_grad_enabled() and 0 in args[0]:
            raise error
        return forward(self, batch, *args)

    cfg = runs.config(states, tmp_path / "r", save_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(AlignmentModel, "forward", full)
        trainer = Trainer(cfg)
        items = [trainer.data.train.items[index] for index in trainer.order.batch(3)]
        with pytest.raises(ModelError, match="out of memory in step 4") as raised:
            trainer.fit()
    message = str(raised.value)
    for item in items:
        lengths = "/".join(str(len(prompt) + len(item.answer)) for prompt in item.prompts)
        assert f"{item.id} ({lengths})" in message
    for remedy in ("gradient_accumulation", "gradient_checkpointing", "objective.chunk", "data.max_length"):
        assert remedy in message
    assert read_json(tmp_path / "r" / "failure.json")["questions"] == [item.id for item in items]
    # with what it names lowered, the run ends where it would have
    lower = replace(
        cfg, resume=True, trainer=replace(cfg.trainer, gradient_accumulation=2, gradient_checkpointing=True)
    )
    train(lower)
    for name, value in runs.weights(run).items():
        torch.testing.assert_close(runs.weights(tmp_path / "r")[name], value, rtol=1e-3, atol=1e-5)


def test_other_errors_are_not_taken_for_want_of_memory(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remind.alignment.trainer.run", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        train(runs.config(states, tmp_path / "r", eval_every=0))


LIMITED = """
import resource
from remind.alignment.trainer import Trainer
step = Trainer.train_step
def limited(self):
    if self.step == {step}:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
    return step(self)
Trainer.train_step = limited
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_no_space_leaves_what_was_there(runs: Any, run: Path, states: Path, tmp_path: Path, what: str) -> None:
    """The kernel refuses to let a file grow past a size: of a checkpoint's weights, or of the metrics."""
    cfg = runs.config(states, tmp_path / "r")
    size = 1_000_000 if what == "checkpoint" else 2_000
    process = runs.start(cfg, LIMITED.format(step=2, size=size))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2, errors
    message = errors.splitlines()[-1]
    assert "cannot be written" in message
    assert "make room" in message
    assert ("step-00000004" if what == "checkpoint" else "metrics.jsonl") in message
    folder = tmp_path / "r" / checkpoint.FOLDER
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    checkpoint.verify(folder / "step-00000002")
    train(replace(cfg, resume=True))
    runs.assert_identical(runs.weights(tmp_path / "r"), runs.weights(run))
    assert runs.timeless(tmp_path / "r") == runs.timeless(run)


class Tracker:
    name = "own"
    requires_logging_directory = False
    lines: ClassVar[list[dict[str, Any]]] = []
    ended = False

    def __init__(self, project: str) -> None:
        assert project == "remind"

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["trainer.lr"] == "0.001"

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append({**values, "step": step})

    def finish(self) -> None:
        type(self).ended = True


def test_trackers_are_told_what_the_metrics_say(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own", Tracker)
    out = train(runs.config(states, tmp_path / "r", max_steps=2, trackers=("own",)))
    rows = read_metrics(out)
    assert [line["step"] for line in Tracker.lines] == [row["step"] for row in rows]
    assert Tracker.lines[0]["eval/ce0"] == rows[0]["ce0"]
    assert Tracker.ended
    with pytest.raises(ConfigError, match="no tracker 'tensorbord'"):
        train(runs.config(states, tmp_path / "q", trackers=("tensorbord",)))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("told", ["true", "True"])
def test_deepspeed_is_refused_before_anything_is_made(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", told)
    with pytest.raises(ConfigError, match=r"DeepSpeed .* several times .* use DDP, or FSDP"):
        train(runs.config(states, tmp_path / "r"))
    assert not (tmp_path / "r").exists()
