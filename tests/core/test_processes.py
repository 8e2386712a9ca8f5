"""Pools of processes, folders with one writer, signals, progress, and packages that are missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remind.core import EXTRAS, optional, progress
from remind.core.errors import ConfigError, ModelError
from remind.core.progress import ProgressBar
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
    with pytest.raises(ConfigError, match=f"another process is at work in {out}"), RunFolder(out).held():
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


WORK = """
import os, sys, time
from dataclasses import dataclass
from remind.core.cli import main
from remind.core.processes import spawned_pool
from remind.core.progress import ProgressBar

@dataclass
class Config:
    pass

def work(cfg):
    bar = ProgressBar("work", 9)
    with spawned_pool(1) as pool:
        asleep = pool.submit(time.sleep, 60)
        print(pool.submit(os.getpid) and [*pool._processes][0], flush=True)
        asleep.result()

if __name__ == "__main__":
    main(Config, work, "", [])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_and_its_workers_in_a_line(number: signal.Signals, status: int, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "REMIND_QUIET": ""}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "work.py"], env=variables, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    # a signal that comes just before a thread blocks in a lock is not seen by Python until the lock is free
    time.sleep(0.5)
    # a terminal sends Ctrl-C to all processes of a command
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.splitlines()[1:]) == (status, [f"stopped by {number.name}"])
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_lines_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(progress.tqdm, "monitor_interval", 0)
    with ProgressBar("states", 40.0, percent=True) as bar:
        bar.skip(20.0)
        for _ in range(5):
            now += 100
            bar.step(0, "reading")
        assert capsys.readouterr().err.count("reading") == 5
        for _ in range(8):
            now += progress.LINE_SECONDS / 4
            bar.step(1.0, "segments")
        lines = [line for line in capsys.readouterr().err.split("\n") if "segments" in line]
    # one unit takes 7.5 s: what was there before and the preparation do not count
    assert lines == ["states:  60% 00:30, ETA 02:00, segments", "states:  70% 01:00, ETA 01:30, segments"]


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"^train-x needs .*{package}.*'remind-toolkit\[{EXTRAS[package]}\]'"):
        optional(f"{package}.inner", "train-x")
