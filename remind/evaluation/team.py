"""The processes of one launch, among which an evaluation deals out its work."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import distributed

from remind.core.errors import ConfigError, ModelError, RemindError, told
from remind.core.processes import WHOLE, Shard

T = TypeVar("T")
#: How long a process waits for the others. They may have hours of work; one that dies is noticed at once.
_PATIENCE = timedelta(days=30)
#: Where a process says that it has failed.
_FAILED = "failed"


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
        mine: T | ModelError
        try:
            mine = work()
        except (RemindError, OSError) as error:
            if self.leads:
                raise
            mine = ModelError(f"process {self.shard.index}: {told(error)}")
            self._store.set(_FAILED, str(mine))
        results: list[Any] = [mine]
        if self._store is not None:
            results *= self.shard.count
            with _together(self.shard):
                distributed.gather_object(mine, results if self.leads else None, dst=0)
        for result in results if self.leads else ():
            if isinstance(result, ModelError):
                raise result
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
            store, rank, size = next(distributed.rendezvous("env://"))
        except ValueError as error:
            raise ConfigError(f"{shard.count} processes cannot connect ({error}); use accelerate launch") from None
        # objects alone are exchanged, which stay on the CPU
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    atexit.register(distributed.destroy_process_group)
    return Team(shard, store)
