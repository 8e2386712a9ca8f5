"""Runs that are told to stop, or run out of memory or disk: nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.alignment.metrics import checkpoints, kept
from remind.alignment.step import AlignmentModel
from remind.core.errors import ModelError
from remind.train_pra.run import make_trainer, train


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")],
)
def test_out_of_memory_names_sizes_and_remedies(
    runs: Any, run: Path, states: Path, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = AlignmentModel.forward

    def full(self: AlignmentModel, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # with one of the passes of a microbatch gone, some gradients are there already
        if trainer.state.global_step == 3 and torch.is_grad_enabled() and 0 in args[0]:
            raise error
        return forward(self, batch, *args, **kwargs)

    cfg = runs.config(states, tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(AlignmentModel, "forward", full)
        trainer = make_trainer(cfg)
        with pytest.raises(ModelError, match=r"^out of memory in step 4, [^\n]*$") as raised:
            trainer.train()
    items = [trainer.train_dataset.items[place] for place in trainer._order.batch(3)]
    message = str(raised.value)
    for item in items:
        lengths = "/".join(str(len(prompt) + len(item.answer)) for prompt in item.prompts)
        assert f"{item.id} ({lengths})" in message
    for remedy in ("gradient_accumulation_steps", "gradient_checkpointing", "chunk", "max_length"):
        assert remedy in message
    # with what it names lowered, the run ends where it would have
    train(replace(cfg, resume=True, trainer=replace(cfg.trainer, gradient_accumulation_steps=2)))
    for name, value in runs.weights(run).items():
        torch.testing.assert_close(runs.weights(tmp_path / "r")[name], value, rtol=1e-3, atol=1e-5)


#: The kernel refuses to let a file grow past a size: of a checkpoint's weights, of its moments, or of the metrics.
SIZES = {"model.safetensors": 1_000_000, "optimizer.pt": 8_000_000, "metrics.jsonl": 2_000}


@pytest.mark.slow
@pytest.mark.parametrize("file", SIZES)
def test_no_space_leaves_what_was_there(runs: Any, run: Path, states: Path, tmp_path: Path, file: str) -> None:
    cfg = runs.config(states, tmp_path / "r")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZES[file]}, {SIZES[file]}))"
    errors = runs.through(cfg, runs.at(2, limit), status=2)
    last = errors.splitlines()[-1]
    assert last.startswith("error: ")
    assert ("metrics.jsonl" if file == "metrics.jsonl" else "checkpoint-4") in last
    assert [f.name for f in checkpoints(tmp_path / "r") if kept(f)] == ["checkpoint-2"]
    train(replace(cfg, resume=True))
    runs.assert_same_runs(tmp_path / "r", run)
