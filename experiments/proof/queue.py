"""Runs on several processes of one thread each. What is done is on disk, so that a killed script goes on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.proof.store import RunStore, Spec
from remind.core.errors import ConfigError
from remind.core.processes import leave_with_parent, spawned_pool
from remind.core.progress import ProgressBar


def run_all(store: RunStore, specs: Sequence[Spec], workers: int, title: str) -> dict[str, dict[str, Any]]:
    """Do the runs that are not done yet, and read all of them.

    Args:
        workers: processes; 0: this one.
        title: of the progress line.

    Returns:
        Results by key.

    Raises:
        RemindError: of the first run that failed; those that were done stay.
    """
    wanted = {store.key(spec): spec for spec in specs}
    todo = [spec for spec in wanted.values() if not store.done(spec)]
    if todo:
        _clear(store.out / "work")
        print(f"{title}: {len(wanted)} runs, {len(wanted) - len(todo)} of them done before", file=sys.stderr)
        with ProgressBar(title, len(todo)) as bar:
            for _ in _perform(store, groups(store, todo, workers), workers):
                bar.advance_to(sum(store.done(spec) for spec in todo))
    return {key: store.result(spec) for key, spec in wanted.items()}


def groups(store: RunStore, specs: Sequence[Spec], workers: int) -> list[list[Spec]]:
    """Runs that learn from the same states together, cut so that no worker has more than its share in one group."""
    by_states: dict[str, list[Spec]] = {}
    for spec in specs:
        by_states.setdefault(store.states_key(spec), []).append(spec)
    size = -(-len(specs) // max(1, workers))
    return [group[start : start + size] for group in by_states.values() for start in range(0, len(group), size)]


def _perform(store: RunStore, todo: Sequence[Sequence[Spec]], workers: int) -> Iterator[None]:
    """Do the runs; yields now and then, for progress."""
    if not workers:
        with _one_thread():
            for group in todo:
                _run_group(store, group)
                yield
        return
    with spawned_pool(min(workers, len(todo)), _start_worker) as pool:
        pending = {pool.submit(_run_group, store, group) for group in todo}
        try:
            while pending:
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker() -> None:
    import torch

    leave_with_parent()
    os.environ["REMIND_QUIET"] = "1"
    torch.set_num_threads(1)


def _run_group(store: RunStore, group: Sequence[Spec]) -> None:
    from experiments.proof.runs import Runner

    with Runner(store) as runner:
        for spec in group:
            runner.perform(spec)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread, as in the workers, so that sums have the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _clear(work: Path) -> None:
    """Remove what killed processes have left; refuse to work beside a live one."""
    for folder in sorted(work.glob("*")):
        try:
            os.kill(int(folder.name), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            raise ConfigError(f"{folder}: process {folder.name} works here; wait for it, or choose another out")
