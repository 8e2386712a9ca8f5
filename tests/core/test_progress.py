"""Progress: an ETA by what was really done, lines where there is no terminal."""

from __future__ import annotations

import pytest

from remind.core import progress
from remind.core.progress import ProgressBar


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
