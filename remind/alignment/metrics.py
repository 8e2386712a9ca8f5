"""Metrics of a run: metrics.jsonl, one line per step and per measurement of the held-out loss; trackers beside it."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remind.alignment.checkpoint import saving
from remind.alignment.config import Objective
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError, DataError
from remind.core.files import write_text

METRICS = "metrics.jsonl"


def summary(objective: Objective, values: dict[str, Tensor]) -> dict[str, float]:
    """Means over samples of per-sample values by name, each [n].

    Returns:
        `total`; `hard` (sum over the hard levels) and `dist01`, …, as they are before λ, τ² and γ; `jsd01`, … (Eq. 21);
        `ce0`, … and `entropy0`, …; and `share_hard`, `share_dist01`, …: what each adds to the total, as a share of it
        (Figure 14).
    """
    means = {name: float(value.mean()) for name, value in values.items()}
    parts = objective.parts(means)
    total = sum(parts.values())
    shares = {f"share_{name}": part / total if total else 0.0 for name, part in parts.items()}
    hard = sum(means.pop(f"hard{level}") for level in objective.hard_levels if f"hard{level}" in means)
    return {"total": total, "hard": hard, **means, **shares}


def load(examples: Sequence[Example], levels: Sequence[int], seconds: float) -> dict[str, float]:
    """How much a step had to do: samples, tokens under the levels that ran, answer tokens, and how fast."""
    tokens = sum(example.tokens_under(levels) for example in examples)
    return {
        "samples": len(examples),
        "tokens": tokens,
        "answer_tokens": sum(len(example.answer) for example in examples),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def peak_memory(device: torch.device) -> float:
    """GiB this process has needed at most: on a GPU of its memory since the last call, else of main memory."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, or nothing: what was written of it is taken back if the rest does not fit."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


class MetricsLog:
    """Appends to metrics.jsonl; only the first process may write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def append(self, row: dict[str, Any]) -> None:
        """Raises ModelError, and leaves the file as it was, where the line cannot be written."""
        with saving(self.path, "set resume to go on from the newest checkpoint"):
            append_line(self.path, json.dumps(row))

    def cut(self, step: int, evaluated: int) -> None:
        """Forget the training steps after `step` and what was held out after `evaluated`: that is done again."""
        if self.path.exists():
            rows = read_metrics(self.path.parent)
            rows = [row for row in rows if row["step"] <= (step if row["kind"] == "train" else evaluated)]
            with saving(self.path):
                write_text(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_metrics(run_folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut off is left out. Raises DataError if there is no file."""
    path = Path(run_folder) / METRICS
    if not path.is_file():
        raise DataError("no such file: not a run folder, or it has not begun", path)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError("not JSON", path, f"line {number}") from None
    return rows


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a name accelerate knows no tracker for."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if unknown := [name for name in names if name not in LOGGER_TYPE_TO_CLASS]:
        names_known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
        raise ConfigError(f"trainer.trackers: no tracker {unknown[0]!r}; there are {names_known}")


class Trackers:
    """Accelerate's trackers beside metrics.jsonl. None can end a run: one that fails is left out from then on."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, str], main: bool = True) -> None:
        self._open: dict[str, Any] = {}
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
        # trackers raise anything, and some end the process instead of raising
        try:
            action()
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            _warn(name, f"does not work: {type(error).__name__}: {error}")


def _warn(name: str, what: str) -> None:
    line = " ".join(f"tracker {name} {what}".split())
    print(f"warning: {line[:300]}; going on without it", file=sys.stderr)
