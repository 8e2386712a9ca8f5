"""Progress with an ETA on standard error; quiet on all but the first process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import accumulate
from time import monotonic
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

T = TypeVar("T")
Hear = Callable[[float], None]

#: Seconds between lines where there is no terminal to draw a bar on.
SAY = 30.0
_hear: ContextVar[Hear | None] = ContextVar("hear", default=None)


def reached(share: float) -> None:
    """Tell whoever is `listening` how much of the work at hand is done, from 0 to 1; nobody may be."""
    if (hear := _hear.get()) is not None:
        hear(share)


@contextmanager
def listening(hear: Hear | None) -> Iterator[None]:
    """Inside the block `hear` is told what is `reached`, and counters draw no bars of their own."""
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)


@contextmanager
def part(start: float, end: float) -> Iterator[None]:
    """What is reached inside the block is a part of the work around it, from `start` to `end` of that."""
    outer = _hear.get()
    if outer is None:
        yield
        return
    with listening(lambda share: outer(start + share * (end - start))):
        yield
    outer(end)


def shares(costs: Sequence[float]) -> list[float]:
    """How much of the work is done after each of its pieces, by what they cost."""
    whole = sum(costs) or 1
    return [done / whole for done in accumulate(costs)]


class _Remaining(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_clock(_remaining(task)), style="progress.remaining")


def _remaining(task: Task) -> float | None:
    """Seconds, at the mean speed so far: pieces of work are of too different kinds for that of the last few."""
    done, seconds = task.completed - task.fields["given"], (task.elapsed or 0.0) - task.fields["since"]
    if task.total is None or done <= 0 or seconds <= 0:
        return None
    return max(0.0, task.total - task.completed) * seconds / done


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


class Counter:
    """A progress bar: `with Counter("train", total) as bar: bar.step(note="loss 1.2")`.

    On no terminal it is a line now and then; inside `listening` nothing but what is told there.

    Args:
        done: how much of the total was there before.
        percent: show the share that is done, for totals in units that mean nothing to people.
    """

    def __init__(self, description: str, total: float, done: float = 0, percent: bool = False) -> None:
        main = int(os.environ.get("RANK", "0")) == 0
        self._hear = _hear.get()
        self._percent = percent
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn() if percent else MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            _Remaining(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stderr),
            disable=not main or bool(os.environ.get("REMIND_QUIET")) or self._hear is not None,
        )
        self._task = self._progress.add_task(description, total=total, note="", given=done, since=0.0)
        self._progress.update(self._task, completed=done)
        self._said = monotonic()

    def __enter__(self) -> Counter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, n: float = 1, note: str = "") -> None:
        """Say that n more are done; 0 before the first: work begins now, and what went before does not count."""
        task = self._progress.tasks[0]
        if n == 0 and task.completed == task.fields["given"]:
            self._progress.update(self._task, since=task.elapsed or 0.0)
        self._progress.update(self._task, advance=n, note=note)
        self._tell()

    def advance_to(self, done: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)
        self._tell()

    def skip(self, n: float) -> None:
        """Count what is there already: it says nothing of how long the rest takes."""
        given = self._progress.tasks[0].fields["given"] + n
        self._progress.update(self._task, advance=n, given=given)

    def _tell(self) -> None:
        task = self._progress.tasks[0]
        if self._hear is not None and task.total:
            self._hear(min(1.0, task.completed / task.total))
        if self._progress.disable or self._progress.console.is_terminal or monotonic() - self._said < SAY:
            return
        self._said = monotonic()
        done = f"{task.percentage:.0f}%" if self._percent else f"{task.completed:.0f} of {task.total:.0f}"
        what = f"{task.description}: {done} in {_clock(task.elapsed)}, ETA {_clock(_remaining(task))}"
        note = task.fields["note"]
        print(f"{what}, {note}" if note else what, file=sys.stderr, flush=True)


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items while showing how many of `total` are done."""
    with Counter(description, total) as bar:
        for item in items:
            yield item
            bar.step()


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """transformers' own bars off: for weights that load in an instant they are noise between our lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
