"""SIGTERM as a wish to stop: it is noted, and the run decides where."""

from __future__ import annotations

import signal
import threading
from types import FrameType

#: Exit status of a process that stopped because of SIGTERM, as shells report it.
STATUS = 128 + signal.SIGTERM


class Termination:
    """While the block runs, SIGTERM sets `wanted` and nothing else; afterwards it has its former effect.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Termination:
        if self._in_main_thread:
            self._former = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            # None: a handler that was not set from Python and cannot be put back
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # launchers may send it more than once; the first is enough
        self.wanted = True
