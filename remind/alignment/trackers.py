"""Accelerate's trackers beside metrics.jsonl. None of them can end a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name accelerate knows no tracker for."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if unknown := [name for name in names if name not in LOGGER_TYPE_TO_CLASS]:
        known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
        raise ConfigError(f"trainer.trackers: no tracker {unknown[0]!r}; there are {known}")


class Trackers:
    """Those of the trackers asked for that can be reached; one that fails later is left out from then on.

    Raises:
        ConfigError: as `check_names`.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, str], main: bool = True) -> None:
        self._open: dict[str, Any] = {}
        check_names(names)
        if not names or not main:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        available = {str(name) for name in get_available_trackers()}
        for name in dict.fromkeys(names):
            if name not in available:
                _warn(name, "is not installed")
                continue
            self._try(name, partial(self._start, LOGGER_TYPE_TO_CLASS[name], name, folder, config))

    def _start(self, kind: Any, name: str, folder: Path, config: Mapping[str, str]) -> None:
        tracker = kind("remind", str(folder)) if kind.requires_logging_directory else kind("remind")
        tracker.start()
        tracker.store_init_configuration(dict(config))
        self._open[name] = tracker

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, dict(values), step=step))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.finish)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        # what a tracker raises is its own affair, and some end the process instead of raising
        try:
            action()
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            _warn(name, f"does not work: {type(error).__name__}: {error}")


def _warn(name: str, what: str) -> None:
    line = " ".join(f"tracker {name} {what}".split())
    print(f"warning: {line[:300]}; going on without it", file=sys.stderr)
