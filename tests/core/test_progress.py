"""Progress: shares of work told through its parts, an ETA by what was really done, lines where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remind.core import progress
from remind.core.progress import Counter, listening, part, reached, shares, track


def test_parts_tell_the_work_around_them() -> None:
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


@pytest.mark.parametrize(
    ("completed", "given", "elapsed", "left"), [(30, 20, 13, 60), (30, 0, 13, 20), (20, 20, 13, None), (90, 0, 5, 0)]
)
def test_what_was_there_before_says_nothing_of_the_rest(
    completed: int, given: int, elapsed: float, left: float | None
) -> None:
    task: Any = SimpleNamespace(completed=completed, total=90, elapsed=elapsed, fields={"given": given, "since": 3})
    assert progress._remaining(task) == left


def test_lines_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMIND_QUIET")
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    with Counter("states", 40.0, percent=True) as bar:
        bar.skip(20.0)
        bar.step(0)
        for _ in range(8):
            now += progress.SAY / 4
            bar.step(1.0, "segments")
        said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert [line.partition(" in 0:00:0")[0] for line in said] == ["states: 60%", "states: 70%"]
    assert all(", ETA 0:0" in line and line.endswith(", segments") for line in said)
    monkeypatch.setenv("REMIND_QUIET", "1")
    with Counter("states", 4) as bar:
        now += progress.SAY
        bar.step()
    assert "states: 1" not in capsys.readouterr().err
