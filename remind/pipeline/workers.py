"""Builds dialogues one after the other, or on several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from remind.core.errors import ModelError
from remind.core.processes import cores, device_of, leave_with_parent, spawned_pool
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.dialogue import DialogueBuilder
from remind.pipeline.outline import Task

#: Dialogues under way for each process: one being built and one on its way, so that memory stays flat.
_AHEAD = 2
#: Seconds between looks at how far the processes are.
_LOOK = 0.5

_builder: DialogueBuilder | None = None


def build_all(
    cfg: BuildStatesConfig,
    identity: dict[str, Any],
    saes: Path,
    missing: Iterator[Task],
    step: Callable[[float, str], None],
) -> Iterator[Task]:
    """Build dialogues, and yield each task when it is done.

    Args:
        identity: `build_identity`. saes: folder of the SAEs.
        missing: what is to be built; read as it is needed.
        step: called with the units of `effort` done since the last call, and the stage; "" where several processes are
            at different ones.

    Raises:
        RemindError: of the first dialogue that failed; those that were built stay.
    """
    workers = cfg.workers or cores()
    if workers > 1:
        yield from _spread(cfg, identity, saes, missing, workers, step)
        return
    builder = DialogueBuilder(cfg, identity, saes, device_of(cfg.device, int(os.environ.get("LOCAL_RANK", "0"))), step)
    for task in missing:
        builder.build(task)
        yield task


def _spread(
    cfg: BuildStatesConfig,
    identity: dict[str, Any],
    saes: Path,
    missing: Iterator[Task],
    workers: int,
    step: Callable[[float, str], None],
) -> Iterator[Task]:
    units = multiprocessing.get_context("spawn").Value("d")
    arguments = (cfg, identity, saes, max(1, cores() // workers), units)
    context = spawned_pool(workers, _start, arguments)
    reported = 0.0

    def finished(under_way: dict[Future[None], Task]) -> Iterator[Task]:
        """The tasks that are built by now, at least one; reports progress while it waits."""
        nonlocal reported
        over: set[Future[None]] = set()
        while not over:
            over = wait(under_way, _LOOK, FIRST_COMPLETED).done
            # without its lock, which a process that was killed may hold
            now = units.get_obj().value
            step(now - reported, "")
            reported = now
        for future in over:
            task = under_way.pop(future)
            future.result()
            yield task

    with context as pool:
        under_way: dict[Future[None], Task] = {}
        try:
            for task in missing:
                under_way[pool.submit(_build, task)] = task
                if len(under_way) >= _AHEAD * workers:
                    yield from finished(under_way)
            while under_way:
                yield from finished(under_way)
        except BrokenProcessPool:
            raise ModelError(
                "a worker process died, perhaps for want of memory; take fewer workers. What is built stays: start it "
                "again"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start(cfg: BuildStatesConfig, identity: dict[str, Any], saes: Path, threads: int, units: Any) -> None:
    """In a new process.

    Args:
        units: what all processes together have done, a float they share.
    """
    global _builder
    leave_with_parent()
    os.environ["REMIND_QUIET"] = "1"
    import torch

    def step(done: float, _: str) -> None:
        with units.get_lock():
            units.value += done

    torch.set_num_threads(threads)
    number = (multiprocessing.current_process()._identity or (1,))[0] - 1
    _builder = DialogueBuilder(cfg, identity, saes, device_of(cfg.device, number), step)


def _build(task: Task) -> None:
    assert _builder is not None
    _builder.build(task)
