"""Processes of one launch: the accelerator of a training run, and a team that deals out work of another kind."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from remind.core.errors import ConfigError, ModelError, RemindError
from remind.core.processes import WHOLE, Shard, shard_of

T = TypeVar("T")
#: How long a process waits for the others. They may have hours of work; one that dies is noticed at once.
_PATIENCE = timedelta(days=30)
#: Where a process says that it has failed.
_FAILED = "failed"
_DEEPSPEED = (
    "training under DeepSpeed is not supported: a step runs the model several times before it goes backward, at which "
    "ZeRO-3 fails (DeepSpeed issue 5321); use DDP, or FSDP with fsdp_version 2"
)


def make_accelerator(out: Path, trackers: Sequence[str] = ()) -> Any:
    """An `accelerate.Accelerator` for one process, DDP or FSDP2.

    Raises:
        ConfigError: processes that did not connect, a tracker that accelerate does not know, or a strategy the trainer
            does not support.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import GradientAccumulationPlugin

    # asked here, since accelerate first misses a package that is of no use
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise ConfigError(_DEEPSPEED)
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
        raise ConfigError(f"launched as {launched} processes that did not connect; see configs/accelerate/cpu_2.yaml")
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


class Team:
    """The processes that a launcher has started for one job. The first leads: it alone holds files and speaks.

    Args:
        shard: the part of this process; by default it is alone.
        store: what all of them see; None where there is one process.
    """

    def __init__(self, shard: Shard = WHOLE, store: Any = None) -> None:
        self.shard, self._store = shard, store

    @property
    def leads(self) -> bool:
        return self.shard.index == 0

    def share(self, value: T | None = None) -> T | None:
        """What the first process gives, on every process.

        Raises:
            ModelError: another process has ended.
        """
        values = [value]
        if self._store is not None:
            with _together(self.shard):
                distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do a piece of work on every process.

        Returns:
            What each of them has made of it, in order, on the first process; nothing on the others.

        Raises:
            ModelError: on the first process, another one has failed, which the message quotes, or has ended.
        """
        mine: T | _Failure
        try:
            mine = work()
        except (RemindError, OSError) as error:
            if self.leads:
                raise
            mine = _Failure(f"process {self.shard.index}: {_in_words(error)}")
            self._store.set(_FAILED, mine.message)
        results: list[Any] = [mine]
        if self._store is not None:
            results *= self.shard.count
            with _together(self.shard):
                distributed.gather_object(mine, results if self.leads else None, dst=0)
        for result in results if self.leads else ():
            if isinstance(result, _Failure):
                raise ModelError(result.message)
        return results if self.leads else []

    def check(self) -> None:
        """Call now and then during long work: the first process goes no further if another has failed.

        Raises:
            ModelError: on the first process, another one has failed.
        """
        if self._store is not None:
            with _together(self.shard):
                if self._store.check([_FAILED]) and self.leads:
                    raise ModelError(self._store.get(_FAILED).decode())


class _Failure(NamedTuple):
    """In place of what a process that failed would have made."""

    message: str


@contextmanager
def _together(shard: Shard) -> Iterator[None]:
    """What all processes do together: where one of them has gone, this one ends, too."""
    try:
        yield
    except RuntimeError:  # the connection is gone
        if shard.index:
            raise SystemExit(2) from None  # the first process has said why it ended
        what = "a process of this run has died, perhaps out of memory; finished work is kept: run it again"
        raise ModelError(what) from None


def _in_words(error: RemindError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@cache
def join() -> Team:
    """The team of all processes of this launch (`accelerate launch`, torchrun); they join at the first call.

    A process that was started alone, or whose caller has made a process group for something else, is a team of one.

    Raises:
        ConfigError: the environment names several processes and not where they meet.
        ModelError: another process has ended.
    """
    shard = shard_of("auto")
    if shard.count == 1 or distributed.is_initialized():
        return Team()
    with _together(shard):
        try:
            store, rank, size = next(distributed.rendezvous("env://"))
        except ValueError as error:
            raise ConfigError(f"{shard.count} processes cannot connect ({error}); use accelerate launch") from None
        # objects alone are exchanged, which stay on the CPU
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    atexit.register(_leave_group)
    return Team(shard, store)


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
