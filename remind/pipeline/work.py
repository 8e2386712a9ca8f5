"""The dialogues of a build, one after the other or on several processes; what is on the shelf is not built again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from remind.errors import ModelError
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.dialogue import Workshop
from remind.pipeline.outline import Task
from remind.processes import cores, device_of, leave_with_parent, spawned_pool

#: Dialogues under way for each process: one being built and one on its way, so that memory stays flat.
_AHEAD = 2

_workshop: Workshop | None = None


def build_all(
    cfg: BuildStatesConfig,
    identity: dict[str, Any],
    saes: Path,
    missing: Iterator[Task],
    step: Callable[[int], None],
    done: Callable[[Task], None],
) -> None:
    """Build dialogues.

    Args:
        identity: `build_identity`. saes: folder of the SAEs.
        missing: what is to be built; read as it is needed.
        step: told how many questions are done; question by question where this process does them itself.
        done: told after every dialogue, in this process.

    Raises:
        RemindError: of the first dialogue that failed; those that were built stay.
    """
    workers = cfg.workers or cores()
    if workers == 1:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        workshop = Workshop(cfg, identity, saes, device_of(cfg.device, rank), lambda: step(1))
        for task in missing:
            workshop.build(task)
            done(task)
        return
    for task in _spread(cfg, identity, saes, missing, workers):
        step(len(task.questions))
        done(task)


def _spread(
    cfg: BuildStatesConfig, identity: dict[str, Any], saes: Path, missing: Iterator[Task], workers: int
) -> Iterator[Task]:
    """Yields each task when it is built."""
    context = spawned_pool(workers, _start, (cfg, identity, saes, max(1, cores() // workers)))
    with context as pool:
        under_way: dict[Future[None], Task] = {}
        try:
            for task in missing:
                under_way[pool.submit(_build, task)] = task
                if len(under_way) >= _AHEAD * workers:
                    yield from _finished(under_way)
            while under_way:
                yield from _finished(under_way)
        except BrokenProcessPool:
            raise ModelError(
                "a worker process died, perhaps for want of memory; take fewer workers. What is built stays: start it "
                "again"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finished(under_way: dict[Future[None], Task]) -> Iterator[Task]:
    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
        task = under_way.pop(future)
        future.result()
        yield task


def _start(cfg: BuildStatesConfig, identity: dict[str, Any], saes: Path, threads: int) -> None:
    """In a new process."""
    global _workshop
    leave_with_parent()
    os.environ["REMIND_QUIET"] = "1"
    import multiprocessing

    import torch

    torch.set_num_threads(threads)
    number = (multiprocessing.current_process()._identity or (1,))[0] - 1
    _workshop = Workshop(cfg, identity, saes, device_of(cfg.device, number))


def _build(task: Task) -> None:
    assert _workshop is not None
    _workshop.build(task)
