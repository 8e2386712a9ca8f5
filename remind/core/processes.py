"""Worker processes, locks between processes, signals, memory and parts of work."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from remind.core.errors import ConfigError


@contextmanager
def spawned_pool(
    workers: int, start: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes (forks of this one could inherit locked locks), each initialised with `start`.

    They end when this process does, so that they do not compete with a resumed run.
    """
    own = (multiprocessing.get_context("spawn"), _start, (start, arguments))
    with ProcessPoolExecutor(workers, *own) as pool:
        # a terminal sends Ctrl-C to them, too, but it is this process that ends them: they inherit what is blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for _ in range(workers):
            pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    if start is not None:
        start(*arguments)


@contextmanager
def locked(file: Path, wait: bool = True, place: Path | None = None) -> Iterator[None]:
    """Hold a lock file; the system frees the lock of a process that dies.

    Args:
        place: what the lock is for, for the message; None: its folder.

    Raises:
        ConfigError: another process holds it and `wait` is false.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        where = place or file.parent
        raise ConfigError(f"another process is at work in {where}; wait for it or choose another") from None
    try:
        yield
    finally:
        lock.release()


def give_back_memory() -> None:
    """Return free memory to the system.

    glibc keeps the holes left by tensors of varying sizes; over a thousand dialogues they exceed the memory in use.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Shard:
    """A part of the work: number `index` (from 0) of `count`."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether piece `number` (from 0) belongs to this shard: every `count`-th does."""
        return number % self.count == self.index


#: All of the work.
WHOLE = Shard()


def device_of(device: str, number: int) -> str:
    """The device of process `number` on this machine: `cuda` alternates between the GPUs, others are used as given."""
    if device != "cuda":
        return device
    import torch

    return f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.device_count() else device


class Termination:
    """While the block runs, SIGTERM and Ctrl-C set `requested` to their number; afterwards they have their former
    effect.

    Outside the main thread, where Python delivers no signals, it does nothing.

    Args:
        at_once: they also end worker processes and raise KeyboardInterrupt.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.requested, self.at_once = 0, at_once

    def __enter__(self) -> Termination:
        self.requested, self._former = 0, {}
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            # None: a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # launchers may send it more than once; the first is enough
        self.requested = self.requested or number
        if self.at_once:
            for child in multiprocessing.active_children():
                child.terminate()
            raise KeyboardInterrupt
