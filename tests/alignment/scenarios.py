"""Trains what each folder of the first argument says, in order, on as many processes as there are.

A folder has a config.yaml, and in told.json what happens in the run: `signal`, or `nan` in the `loss` of the questions
with a `token` or in the `gradient`, on the process `rank` in the step after `step` others. Each process leaves how the
run ended there and which samples it had: end-RANK.json, samples-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from remind.alignment.trainer import PRATrainer
from remind.core.errors import RemindError
from remind.train_pra.run import make_trainer, read_config

RANK = int(os.environ.get("RANK", "0"))
SHARDED = os.environ.get("ACCELERATE_USE_FSDP") == "true"
Told = dict[str, Any]


class Happens(TrainerCallback):
    """What is told."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.here = told.get("rank") == RANK

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert any(isinstance(p, DTensor) for p in model.parameters()) == SHARDED
        step, token = self.told.get("step"), self.told.get("token")

        def embedding(module: Any, given: Any, found: torch.Tensor) -> torch.Tensor:
            now = state.global_step == step and model.training
            return found.masked_fill((given[0] == token)[..., None], float("nan")) if now else found

        if self.told.get("nan") == "loss":
            model.get_input_embeddings().register_forward_hook(embedding)
        elif self.told.get("nan") == "gradient" and self.here:
            weight = next(p for p in model.parameters() if p.requires_grad)
            weight.register_hook(lambda grad: grad * float("nan") if state.global_step == step else grad)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "signal" in self.told and self.here and state.global_step == self.told["step"]:
            os.kill(os.getpid(), signal.Signals[self.told["signal"]])


def shard_without_gpus() -> None:
    """accelerate shards on GPUs alone; the settings of the launcher are in the environment."""
    plainly = PRATrainer.create_accelerator_and_postprocess

    def create(self: PRATrainer) -> None:
        plainly(self)
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True

    PRATrainer.create_accelerator_and_postprocess = create  # type: ignore[method-assign]


def run(folder: Path) -> None:
    told_file = folder / "told.json"
    told: Told = json.loads(told_file.read_text()) if told_file.exists() else {}
    samples: list[tuple[int, list[str]]] = []
    plain = PRATrainer.training_step

    def training_step(self: PRATrainer, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        pairs = inputs if isinstance(inputs, list) else zip(inputs.examples, inputs.weights.tolist(), strict=True)
        samples.append((self.state.global_step + 1, [example.id for example, weight in pairs if weight > 0]))
        return plain(self, model, inputs, *rest)

    PRATrainer.training_step = training_step  # type: ignore[method-assign]
    end: int | str | None = 0
    try:
        cfg = read_config(folder)
        make_trainer(cfg, Happens(told)).train(resume_from_checkpoint=cfg.resume)
    except SystemExit as left:
        end = left.code
    except RemindError as error:
        end = str(error)
    finally:
        PRATrainer.training_step = plain  # type: ignore[method-assign]
    (folder / f"end-{RANK}.json").write_text(json.dumps(end))
    (folder / f"samples-{RANK}.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    if SHARDED:
        shard_without_gpus()
    for one in sorted(Path(sys.argv[1]).iterdir()):
        run(one)
    print(f"rank {RANK} is through", flush=True)
    # torch's own threads now and then abort a process that tears down as usual, after all is done
    os._exit(0)
