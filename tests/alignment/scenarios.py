"""Trains what each folder of the first argument says, in order, on as many processes as there are.

A folder has a config.yaml, and in told.json what happens in the run: `signal`, or `nan` in the `loss` or in the
`gradient`, on the process `rank` in the step after `step` others; and whether it is `sharded`.
Each process leaves how the run ended there: left-RANK.json.
"""

from __future__ import annotations

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
from remind.core.files import read_json, write_json
from remind.train_pra.config import read_config
from remind.train_pra.run import make_trainer

RANK = int(os.environ.get("RANK", "0"))


class Happens(TrainerCallback):
    """What is told."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.here = told.get("rank") == RANK

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert any(isinstance(p, DTensor) for p in model.parameters()) == args.sharded

        def spoilt(values: torch.Tensor) -> torch.Tensor:
            return values * float("nan") if state.global_step == self.told["step"] and model.training else values

        if self.told.get("nan") == "loss" and self.here:
            model.get_input_embeddings().register_forward_hook(lambda _, __, found: spoilt(found))
        elif self.told.get("nan") == "gradient" and self.here:
            next(p for p in model.parameters() if p.requires_grad).register_hook(spoilt)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "signal" in self.told and self.here and state.global_step == self.told["step"]:
            os.kill(os.getpid(), signal.Signals[self.told["signal"]])


def shard_without_gpus(self: PRATrainer, plainly: Any = PRATrainer.create_accelerator_and_postprocess) -> None:
    """accelerate shards on GPUs alone: its plugin is put in place by hand."""
    plainly(self)
    if not self.args.sharded:
        return
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    if self.args.bf16:
        plugin.set_mixed_precision("bf16")
    self.accelerator.state.fsdp_plugin = plugin
    self.accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    self.is_fsdp_enabled = True


def run(folder: Path) -> None:
    told = read_json(folder / "told.json")
    os.environ["ACCELERATE_USE_FSDP"] = str("sharded" in told).lower()
    end: Any = 0
    try:
        cfg = read_config(folder)
        make_trainer(cfg, Happens(told)).train(resume_from_checkpoint=cfg.resume)
    except SystemExit as left:
        end = left.code
    except RemindError as error:
        end = str(error)
    write_json(folder / f"left-{RANK}.json", end)


if __name__ == "__main__":
    PRATrainer.create_accelerator_and_postprocess = shard_without_gpus
    for one in sorted(Path(sys.argv[1]).iterdir()):
        run(one)
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's own threads now and then abort a process that tears down as usual, after all is done
    os._exit(0)
