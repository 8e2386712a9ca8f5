"""Runs that are killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked


@pytest.fixture
def kill(tmp_path: Path) -> Callable[[str, Callable[[], object]], None]:
    """Runs a line of Python, which may import tests, in a process of its own until something is there."""

    def run(line: str, ready: Callable[[], object]) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nif __name__ == '__main__':\n    {line}\n"
        )
        process = Forked(script)
        while not ready() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL

    return run
