"""Progress bars with an ETA on standard error; silent on all but the first process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

#: Seconds between lines where there is no terminal to draw a bar on.
LINE_SECONDS = 30.0


class ProgressBar(tqdm):  # type: ignore[misc]
    """A progress bar: `with ProgressBar("train", total) as bar: bar.step(note="loss 1.2")`.

    Where standard error is no terminal it is a line every `LINE_SECONDS`.

    Args:
        done: how much of the total was there before.
        percent: show the share that is done, for totals in units that mean nothing to people.
    """

    total: float

    def __init__(self, description: str, total: float, done: float = 0, percent: bool = False) -> None:
        count = "" if percent else " {n:.0f}/{total:.0f}"
        super().__init__(
            desc=description,
            total=total,
            initial=done,
            disable=bool(os.environ.get("REMIND_QUIET")) or int(os.environ.get("RANK", "0")) != 0,
            file=sys.stderr,
            leave=sys.stderr.isatty(),
            mininterval=0.1 if sys.stderr.isatty() else LINE_SECONDS,
            miniters=0,
            smoothing=0,  # the mean speed: pieces of work differ too much for that of the last few
            bar_format="{desc}: {percentage:3.0f}%" + count + " {elapsed}, ETA {remaining}{postfix}",
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """In the place of the one before, or a line."""
        if sys.stderr.isatty():
            super().display(msg, pos)
        elif msg is None:
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        if not self.disable and self.n != self.last_print_n and not sys.stderr.isatty():
            self.display()
        super().close()

    def step(self, n: float = 1, note: str = "") -> None:
        """Count `n` more as done; 0 before the first restarts the clock of the ETA, as preparation does not count."""
        if not self.disable and n == 0 and self.initial == self.n:
            # not unpause(): it also counts as a line just drawn, so that none would come during the preparation
            self.start_t = self._time()
        if note:
            self.set_postfix_str(note, refresh=False)
        # an estimate that was too low
        self.total = max(self.total, self.n + n)
        self.update(n)

    def advance_to(self, done: float, note: str = "") -> None:
        """Set how much is done."""
        self.step(done - self.n, note)

    def skip(self, n: float) -> None:
        """Count `n` that were there before, which say nothing about speed."""
        if not self.disable:
            self.initial += n
            self.update(n)


def close_bars() -> None:
    """End all bars, so that what is printed next stands on a line of its own."""
    for bar in list(tqdm._instances):
        bar.close()


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
