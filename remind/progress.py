"""Progress with an ETA on standard error; quiet on all but the first process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


def _bar() -> Progress:
    main = int(os.environ.get("RANK", "0")) == 0
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(file=sys.stderr),
        disable=not main or bool(os.environ.get("REMIND_QUIET")),
    )


class Counter:
    """A progress bar: `with Counter("train", total) as bar: bar.step(note="loss 1.2")`."""

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self._progress = _bar()
        self._task = self._progress.add_task(description, total=total, completed=done, note="")

    def __enter__(self) -> Counter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, n: int = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=n, note=note)

    def advance_to(self, done: int, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)


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
