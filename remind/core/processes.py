"""Worker processes, locks between processes, SIGTERM, memory and shards of work."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from remind.core.errors import ConfigError, DataError, named
from remind.core.files import missing_folders, read_bytes, remove_empty, sweep

#: Exit status of a process that stopped because of SIGTERM, as shells report it.
TERMINATED = 128 + signal.SIGTERM


def leave_with_parent() -> None:
    """Call in a worker process to end it when its parent ends, so that it does not compete with a resumed run."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def spawned_pool(
    workers: int,
    start: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
    libraries: tuple[str, ...] = (),
) -> ProcessPoolExecutor:
    """A pool of new processes (forks of this one could inherit locked locks), each initialised with `start`.

    Args:
        libraries: modules to import. On Linux a fork server imports them once for all workers, which saves time and
            memory.
    """
    context = multiprocessing.get_context("forkserver" if libraries and import_ahead(libraries) else "spawn")
    begin = (dict(os.environ), start, arguments)
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=begin)


def import_ahead(libraries: tuple[str, ...]) -> bool:
    """Start the fork server for pools to come; it imports the libraries while this process goes on with other work.

    Returns:
        False where the system has none; macOS libraries do not survive a fork.
    """
    if sys.platform != "linux":
        return False
    forkserver.set_forkserver_preload(["remind", *libraries])
    try:
        forkserver.ensure_running()
    except OSError:  # no socket: the path of the folder for temporary files is too long, or the file system has none
        return False
    return True


def _begin(environment: dict[str, str], start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # a fork server keeps the environment of its start
    os.environ.clear()
    os.environ.update(environment)
    if start is not None:
        start(*arguments)


@contextmanager
def locked(file: Path, wait: bool = True, place: Path | None = None) -> Iterator[None]:
    """Hold a lock file; the system frees the lock of a process that dies.

    Args:
        place: what the lock is for, for the message; None: its folder.

    Raises:
        ConfigError: another process, which the message names, holds it and `wait` is false.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        where = place or file.parent
        raise ConfigError(f"{_holder(file)} is at work in {where}; wait for it or choose another") from None
    try:
        with suppress(OSError):
            file.write_text(f"{os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep others out of a folder, which is made if missing, and remove what a killed process left half-written.

    If the block writes nothing, for example because it raises an error first, no new folder is left behind.

    Raises:
        ConfigError: another process, which the message names, is at work there.
    """
    new, lock = missing_folders(folder), folder / ".lock"
    with locked(lock, wait=False):
        sweep(folder)
        try:
            yield
        finally:
            if new and [*folder.glob("*")] == [lock]:
                lock.unlink()
                remove_empty(new)


def _holder(file: Path) -> str:
    """What the holder of a lock wrote into it; older versions of filelock empty a file that they cannot lock."""
    try:
        name = read_bytes(file, most=300).decode()
    except (DataError, UnicodeDecodeError):
        name = ""
    return f"process {named(name)}" if name else "another process"


def give_back_memory() -> None:
    """Return free memory to the system.

    glibc keeps the holes left by tensors of varying sizes; over a thousand dialogues they exceed the memory in use.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def resident(field: str, process: int | str = "self") -> int:
    """Resident memory of a process in bytes: field VmRSS now, VmHWM the peak.

    Raises:
        OSError: no /proc, or no such process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    # a process that has just ended has no such lines
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:")), 0)


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

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


#: All of the work.
WHOLE = Shard()


def shard_of(text: str | None, environment: Mapping[str, str] | None = None) -> Shard:
    """The shard of this process.

    Args:
        text: `i/n` counted from 1; auto: from accelerate launch or torchrun, else everything; slurm: from the task of
            a job array, else of the job step; None: everything.

    Raises:
        ConfigError: none of these, i outside 1 to n, or slurm outside of Slurm.
    """
    environment = os.environ if environment is None else environment
    if text is None:
        return WHOLE
    if text == "auto":
        return _numbers(environment, "RANK", "WORLD_SIZE") or WHOLE
    if text == "slurm":
        shard = _array(environment) or _numbers(environment, "SLURM_PROCID", "SLURM_NTASKS")
        if shard is None:
            raise ConfigError("shard slurm: neither a task of a job array nor of a job step (srun)")
        return shard
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"shard is i/n with i from 1 to n, auto or slurm, not {text!r}")
    return Shard(int(index) - 1, int(count))


def _numbers(environment: Mapping[str, str], index: str, count: str) -> Shard | None:
    if index not in environment or count not in environment:
        return None
    try:
        shard = Shard(int(environment[index]), int(environment[count]))
    except ValueError:
        shard = Shard(0, 0)
    if not 0 <= shard.index < shard.count:
        raise ConfigError(f"{index} {environment[index]!r} of {count} {environment[count]!r} is not a valid part")
    return shard


def _array(environment: Mapping[str, str]) -> Shard | None:
    names = [f"SLURM_ARRAY_TASK_{part}" for part in ("ID", "MIN", "MAX", "STEP")]
    if not {*names[:3]} <= environment.keys():
        return None
    task, least, most, step = (int(environment.get(name, "1")) for name in names)
    count = int(environment.get("SLURM_ARRAY_TASK_COUNT", (most - least) // step + 1))
    if count != (most - least) // step + 1:
        raise ConfigError(
            f"the job array has {count} tasks between {least} and {most}: name the parts with --shard i/n"
        )
    return Shard((task - least) // step, count)


def device_of(device: str, number: int) -> str:
    """The device of process `number` on this machine: `cuda` alternates between the GPUs, others are used as given."""
    if device != "cuda":
        return device
    import torch

    return f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.device_count() else device


class Termination:
    """While the block runs, each of these signals sets `requested` to its number and nothing else; afterwards it has
    its former effect.

    Outside the main thread, where Python delivers no signals, it does nothing.

    Args:
        signals: SIGTERM alone if none are given.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.requested: int = 0
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._signals = (signals or (signal.SIGTERM,)) if in_main_thread else ()

    def __enter__(self) -> Termination:
        self._former = [signal.signal(number, self._note) for number in self._signals]
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in zip(self._signals, self._former, strict=True):
            # None: a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # launchers may send it more than once; the first is enough
        self.requested = self.requested or number
