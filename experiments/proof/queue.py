"""Runs on several processes of one thread each. What is done is on disk, so that a killed script goes on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from experiments.proof.bench import Shelf, Spec
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.core.processes import leave_with_parent, spawned_pool
from remind.core.progress import Counter

#: Seconds between looks at what is done, and between lines that say so where there is no terminal.
_LOOK, _SAY = 1.0, 60.0

_workshop: Any = None


def run_all(shelf: Shelf, specs: Sequence[Spec], workers: int, what: str) -> dict[str, dict[str, Any]]:
    """Do the runs that are not done yet, and read all of them.

    Runs that learn from the same states are done one after the other by one process, in the order of the first, unless
    others would have nothing to do.

    Args:
        workers: processes; 0: this one.
        what: for the progress line.

    Returns:
        Results by key.

    Raises:
        RemindError: of the first run that failed; those that were done stay.
    """
    wanted = {shelf.key(spec): spec for spec in specs}
    todo = [spec for key, spec in wanted.items() if not shelf.path(spec).exists()]
    if todo:
        _clear(shelf.out / "work")
        groups: dict[str, list[Spec]] = {}
        for spec in todo:
            groups.setdefault(shelf.data_key(spec), []).append(spec)
        print(f"{what}: {len(wanted)} runs, {len(wanted) - len(todo)} of them done before", file=sys.stderr)
        with _Progress(what, shelf, todo) as progress:
            if workers:
                _spread(shelf, _shared_out(list(groups.values()), workers), workers, progress)
            else:
                _alone(shelf, list(groups.values()), progress)
    return {key: read_result(shelf.path(spec)) for key, spec in wanted.items()}


def read_result(path: Path) -> dict[str, Any]:
    """The result of a run. Raises DataError where there is none or it is not one."""
    found = read_json(path)
    if not isinstance(found, dict) or not {"spec", "right", "flops", "seconds"} <= found.keys():
        raise DataError("not the result of a run; remove it and start again", path)
    return found


class _Progress:
    """A bar with an ETA, or on no terminal a line now and then."""

    def __init__(self, what: str, shelf: Shelf, todo: Sequence[Spec]) -> None:
        self.what, self.left, self.total = what, [shelf.path(spec) for spec in todo], len(todo)
        self.plain = not sys.stderr.isatty()
        self.bar = Counter(what, self.total)
        self.began = self.said = monotonic()

    def __enter__(self) -> _Progress:
        if not self.plain:
            self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.plain:
            self.bar.__exit__(*error)

    def look(self) -> None:
        self.left = [path for path in self.left if not path.exists()]
        done, now = self.total - len(self.left), monotonic()
        if not self.plain:
            self.bar.advance_to(done)
        elif done and (now - self.said > _SAY or not self.left) and not os.environ.get("REMIND_QUIET"):
            self.said = now
            each = (now - self.began) / done
            minutes = each * len(self.left) / 60
            print(
                f"{self.what}: {done} of {self.total} runs, {each:.1f} s each, ETA {minutes:.0f} min", file=sys.stderr
            )


def _alone(shelf: Shelf, groups: Sequence[Sequence[Spec]], progress: _Progress) -> None:
    from experiments.proof.runs import Workshop

    with one_thread():
        workshop = Workshop(shelf)
        try:
            for group in groups:
                for spec in group:
                    workshop.perform(spec)
                    progress.look()
        finally:
            workshop.leave()


def _shared_out(groups: list[list[Spec]], workers: int) -> list[list[Spec]]:
    """Where there are fewer groups than workers, the longest is halved until nobody is idle."""
    while len(groups) < workers and (longest := max(groups, key=len))[1:]:
        place, half = groups.index(longest), len(longest) // 2
        groups[place : place + 1] = [longest[:half], longest[half:]]
    return groups


def _spread(shelf: Shelf, groups: Sequence[Sequence[Spec]], workers: int, progress: _Progress) -> None:
    with spawned_pool(min(workers, len(groups)), _start, (shelf,)) as pool:
        pending: set[Future[None]] = {pool.submit(_perform, list(group)) for group in groups}
        try:
            while pending:
                done, pending = wait(pending, timeout=_LOOK, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress.look()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start(shelf: Shelf) -> None:
    """In a new process."""
    global _workshop
    leave_with_parent()
    os.environ["REMIND_QUIET"] = "1"
    import torch

    from experiments.proof.runs import Workshop

    torch.set_num_threads(1)
    _workshop = Workshop(shelf)


def _perform(group: Sequence[Spec]) -> None:
    try:
        for spec in group:
            _workshop.perform(spec)
    finally:
        _workshop.leave()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as in the processes of a queue, so that sums have the same order."""
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
        if folder.name.isdigit() and int(folder.name) != os.getpid() and _alive(int(folder.name)):
            raise ConfigError(f"{folder}: process {folder.name} works here; wait for it, or choose another out")
        shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
