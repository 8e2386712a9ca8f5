"""What the benchmarks share: the clock, what they ran on, and dialogues put together."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from remind.data.dialogue import Session, Turn


def resident(field: str, process: int | str = "self") -> int:
    """Resident memory of a process in bytes: field VmRSS now, VmHWM the peak.

    Raises:
        OSError: no /proc, or no such process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    # a process that has just ended has no such lines
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:")), 0)


def seconds(run: Callable[[], Any], device: str | torch.device = "cpu") -> float:
    """Seconds that `run` takes, with what it leaves to a GPU."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    started = perf_counter()
    run()
    wait()
    return perf_counter() - started


def about(*libraries: str, device: str | torch.device = "cpu") -> dict[str, str]:
    """Machine, device and versions, for the head of a report."""
    gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "machine": f"{platform.platform()}, {_processor()}",
        "device": name,
        "python": platform.python_version(),
        **{library: version(library) for library in libraries},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def headline(facts: dict[str, str]) -> str:
    """`about` in a line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def renumbered(sessions: Sequence[Session]) -> tuple[Session, ...]:
    """Sessions of several dialogues as those of one: images counted from 0, without their files."""
    count, result = 0, []
    for session in sessions:
        turns: list[Turn] = []
        for turn in session.turns:
            images = [replace(image, index=count + n, path=None, source=None) for n, image in enumerate(turn.images)]
            count += len(images)
            turns.append(replace(turn, images=tuple(images)))
        result.append(replace(session, turns=tuple(turns)))
    return tuple(result)
