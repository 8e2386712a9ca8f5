"""Pools of processes, folders with one writer, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remind.core.errors import ConfigError
from remind.core.processes import Termination
from remind.core.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def test_a_folder_has_one_writer_and_one_run(tmp_path: Path) -> None:
    """The lock of a process that was killed is free, and what it left half-written is gone."""
    out = tmp_path / "runs" / "out"
    code = f"""
import os, time
from remind.core.files import atomic_path
from remind.core.run_folder import RunFolder
with RunFolder({str(out)!r}).held() as run, atomic_path(run.path / "half"):
    run.claim({{"a": 1, "b": {{"c": 2}}}})
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {process.pid} on .* is at work in {out}"), RunFolder(out).held():
        pass
    process.kill()
    process.wait()
    assert [*out.glob(".half.*.tmp")]
    with RunFolder(out).held() as run:
        assert sorted(path.name for path in out.iterdir()) == [".lock", "config.yaml"]
        run.claim({"b": {"c": 3}, "a": 1}, resume=True, free={"b.c"})
        for config, resume, words in (
            ({"a": 1, "b": {"c": 2}}, False, "already holds a run"),
            ({"a": 2, "b": {"c": 2}}, True, r"run with other settings \(a\)"),
        ):
            with pytest.raises(ConfigError, match=words):
                run.claim(config, resume)


def test_a_folder_in_which_nothing_is_written_goes_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunFolder(tmp_path / "a" / "b").held():
        raise RuntimeError
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"), RunFolder(tmp_path / "file").held():
        pass
    with pytest.raises(ConfigError, match="not of a run"):
        RunFolder(tmp_path).claim({})


def test_signals_are_noted_and_have_their_former_effect_afterwards() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = [signal.getsignal(number) for number in numbers]
    with Termination() as termination:
        assert not termination.requested
        for number in reversed(numbers):
            os.kill(os.getpid(), number)
        # the first counts
        assert termination.requested == signal.SIGINT
    assert [signal.getsignal(number) for number in numbers] == former
