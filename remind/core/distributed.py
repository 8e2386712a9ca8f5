"""The accelerator of a training run, and the strategies the trainer supports."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remind.core.errors import ConfigError


def make_accelerator(out: Path, trackers: Sequence[str] = ()) -> Any:
    """An `accelerate.Accelerator` for one process, DDP or FSDP2.

    Raises:
        ConfigError: processes that did not join, a tracker that accelerate does not know, or a strategy the trainer
            does not support.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import GradientAccumulationPlugin

    if unknown := [name for name in trackers if name not in LOGGER_TYPE_TO_CLASS]:
        raise ConfigError(f"trackers: no tracker {unknown[0]!r}; there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    device = torch.accelerator.current_accelerator(check_available=True)
    accelerator = Accelerator(
        # without it, processes on a machine without a GPU would each train alone; Apple's GPUs have no float64, in
        # which metrics are summed
        cpu=device is None or device.type == "mps",
        log_with=list(trackers) or None,
        project_dir=str(out),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        # the step accumulates by itself; a number in the launcher's config would divide the loss again
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ConfigError(f"launched as {launched} processes that did not join; see configs/accelerate/cpu_2.yaml")
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP") or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise ConfigError(f"training under {kind} is not supported; use DDP, or FSDP with fsdp_version 2")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(f"mixed_precision {accelerator.mixed_precision} is not supported; use no or bf16")
    if launched > 1:
        atexit.register(_leave_group)
    return accelerator


def sharded(accelerator: Any) -> bool:
    """Whether parameters are sharded (FSDP2)."""
    return bool(accelerator.distributed_type.value == "FSDP")


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
