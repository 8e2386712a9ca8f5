"""Every reader takes any change of a valid file: it is read rightly, or refused with one typed line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fuzzing import __main__ as runner
from fuzzing.targets import Target, make_check, make_targets, wrong

from remind.core.errors import DataError


@pytest.mark.parametrize("name", list(make_targets()))
def test_changed_files_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    for number, data in enumerate((target := make_targets()[name]).seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        target.run(data, folder)
    make_check(name)()


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes, folder: Path) -> None:
        if b"NaN" in data:
            raise KeyError("planted")

    target = Target((b'{"a": 1}',), run)
    monkeypatch.setattr("fuzzing.targets.make_targets", lambda: {"json": target})
    with pytest.raises(AssertionError, match="KeyError: 'planted'"):
        make_check("json", 300)()


def test_slow_runs_and_errors_of_several_lines_are_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def two_lines(data: bytes, folder: Path) -> None:
        raise type("Two", (DataError,), {"__str__": lambda self: "a\nb"})("x")

    assert wrong(Target((), two_lines), b"", tmp_path) == "Two is not one line"
    monkeypatch.setattr("fuzzing.targets.SLOW", -1.0)
    assert "took" in str(wrong(Target((), lambda data, folder: None), b"", tmp_path))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzzing", "--random", "--seconds", "1", "--targets", "chat"])
    runner.main()
    assert re.fullmatch(r"chat: \d+ cases, no finding\n", capsys.readouterr().out)


def test_coverage_guides_the_fuzzer() -> None:
    """Atheris follows only what is imported after it; a fuzzer that sees nothing must say so."""
    pytest.importorskip("atheris", reason="needs atheris (pip install atheris)")
    assert runner.guided("json", 2) > 10
    with pytest.raises(SystemExit, match="does not see which code"):
        runner.guided("json", 1, runner.GUIDED.replace('["remind"]', '["elsewhere"]'))
