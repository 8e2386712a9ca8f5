"""The processes of one launch, among which an evaluation deals out its work."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import distributed

from remind.core.errors import ConfigError, ModelError
from remind.core.processes import WHOLE, Shard

T = TypeVar("T")
#: How long a process waits for the others. They may have hours of work; one that dies is noticed at once.
_PATIENCE = timedelta(days=30)


class Team:
    """The processes that a launcher has started for one job. The first leads: it alone holds files and speaks.

    One that fails says why, and ends: the others notice, and end, too.

    Args:
        shard: the part of this process; by default it is alone.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard = shard

    @property
    def leads(self) -> bool:
        return self.shard.index == 0

    def share(self, value: T | None = None) -> T | None:
        """What the first process gives, on every process.

        Raises:
            ModelError: another process has ended.
        """
        values = [value]
        if self.shard.count > 1:
            with _together(self.shard):
                distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """What each process gives, in order, on the first process; nothing on the others.

        Raises:
            ModelError: another process has ended.
        """
        values: list[Any] = [value] * self.shard.count
        if self.shard.count > 1:
            with _together(self.shard):
                distributed.gather_object(value, values if self.leads else None, dst=0)
        return values if self.leads else []


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


@cache
def join() -> Team:
    """The team of all processes of this launch (`accelerate launch`, torchrun); they join at the first call.

    A process that was started alone, or whose caller has made a process group for something else, is a team of one.

    Raises:
        ConfigError: the environment names several processes and not where they meet.
        ModelError: another process has ended.
    """
    shard = Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if shard.count == 1 or distributed.is_initialized():
        return Team()
    with _together(shard):
        try:
            # objects alone are exchanged, which stay on the CPU
            distributed.init_process_group("gloo", timeout=_PATIENCE)
        except ValueError as error:
            raise ConfigError(f"{shard.count} processes cannot connect ({error}); use accelerate launch") from None
    atexit.register(distributed.destroy_process_group)
    return Team(shard)
