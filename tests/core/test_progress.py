"""Progress: shares of nested parts of work, an ETA by what was really done, lines where there is no terminal."""

from __future__ import annotations

import pytest

from remind.core import progress
from remind.core.progress import ProgressBar, listening, part, reached, shares, track


def test_parts_report_to_the_work_around_them() -> None:
    heard: list[float] = []
    reached(0.3)  # nobody listens
    with part(0.2, 0.6):
        reached(1.0)
    with listening(heard.append):
        with part(0.0, 0.5):
            reached(0.5)
            with part(0.5, 1.0):
                reached(0.5)
        with part(0.5, 1.0):
            assert list(track("ab", "letters", 2)) == ["a", "b"]
    reached(1.0)
    assert heard == [0.25, 0.375, 0.5, 0.5, 0.75, 1.0, 1.0]


def test_shares_add_up() -> None:
    assert shares([1, 2, 5]) == [0.125, 0.375, 1.0]
    assert shares([]) == []
    assert shares([0, 0]) == [0.0, 0.0]


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
        lines = [line.strip() for line in capsys.readouterr().err.split("\r") if "segments" in line]
    # one unit takes 7.5 s: what was there before and the preparation do not count
    assert lines == ["states:  60% 00:30, ETA 02:00, segments", "states:  70% 01:00, ETA 01:30, segments"]
    capsys.readouterr()
    monkeypatch.setenv("REMIND_QUIET", "1")
    with ProgressBar("states", 4) as bar:
        now += progress.LINE_SECONDS
        bar.step()
    assert capsys.readouterr().err == ""


def test_a_bar_that_is_not_shown_skips() -> None:
    heard: list[float] = []
    with listening(heard.append), ProgressBar("steps", 10) as bar:
        bar.skip(4)
        bar.step()
    assert heard == [0.5]
