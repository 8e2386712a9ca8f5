"""Progress bars with an ETA on standard error; silent on all but the first process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
Listener = Callable[[float], None]

#: Seconds between lines where there is no terminal to draw a bar on.
LINE_SECONDS = 30.0
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def reached(share: float) -> None:
    """Report how much of the current work is done, from 0 to 1, to the listener if there is one."""
    if (listener := _listener.get()) is not None:
        listener(share)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Inside the block `listener` gets what is `reached`, and progress bars are not drawn."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def part(start: float, end: float) -> Iterator[None]:
    """What is reached inside the block counts as the part from `start` to `end` of the work around it."""
    outer = _listener.get()
    if outer is None:
        yield
        return
    with listening(lambda share: outer(start + share * (end - start))):
        yield
    outer(end)


def shares(costs: Sequence[float]) -> list[float]:
    """The share of the work that is done after each of its pieces, from what the pieces cost."""
    total = sum(costs) or 1
    return [done / total for done in accumulate(costs)]


class ProgressBar:
    """A progress bar: `with ProgressBar("train", total) as bar: bar.step(note="loss 1.2")`.

    Where standard error is no terminal it is a line every `LINE_SECONDS`; inside `listening` nothing is drawn.

    Args:
        done: how much of the total was there before.
        percent: show the share that is done, for totals in units that mean nothing to people.
    """

    def __init__(self, description: str, total: float, done: float = 0, percent: bool = False) -> None:
        self._listener = _listener.get()
        count = "" if percent else " {n:.0f}/{total:.0f}"
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=done,  # type: ignore[arg-type]  # floats work
            disable=self._listener is not None
            or bool(os.environ.get("REMIND_QUIET"))
            or int(os.environ.get("RANK", "0")) != 0,
            file=sys.stderr,
            mininterval=0.1 if sys.stderr.isatty() else LINE_SECONDS,
            miniters=0,
            smoothing=0,  # the mean speed: pieces of work differ too much for that of the last few
            bar_format="{desc}: {percentage:3.0f}%" + count + " {elapsed}, ETA {remaining}{postfix}",
        )
        self._done, self._total = done, total

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, n: float = 1, note: str = "") -> None:
        """Count `n` more as done; 0 before the first restarts the clock of the ETA, as preparation does not count."""
        self.advance_to(self._done + n, note)

    def advance_to(self, done: float, note: str = "") -> None:
        """Set how much is done."""
        if not self._bar.disable and done == self._bar.initial == self._bar.n:
            # not unpause(): it also counts as a line just drawn, so that none would come during the preparation
            self._bar.start_t = self._bar._time()
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._done)
        self._done = done
        if self._listener is not None and self._total:
            self._listener(min(1.0, done / self._total))

    def skip(self, n: float) -> None:
        """Count `n` that were there before, which say nothing about speed."""
        self._done += n
        if not self._bar.disable:  # a bar that is off has no `initial`
            self._bar.initial += n
            self._bar.update(n)


def warn(message: str) -> None:
    """Print a warning on standard error, on a line of its own where a bar is drawn."""
    tqdm.write(f"warning: {message}", file=sys.stderr)


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items while showing how many of `total` are done."""
    with ProgressBar(description, total) as bar:
        for item in items:
            yield item
            bar.step()


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """transformers' own bars off: for weights that load in an instant they are noise between our lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
