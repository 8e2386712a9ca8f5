"""Every reader takes any change of a valid file: it is read rightly, or refused with one typed line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzzing.targets import Target, make_check, make_targets


@pytest.mark.parametrize("name", list(make_targets()))
def test_changed_files_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    for number, data in enumerate((target := make_targets()[name]).seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        target.run(data, folder)
    make_check(name, int(os.environ.get("REMIND_FUZZ", "25")))()


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes, folder: Path) -> None:
        if b"NaN" in data:
            raise KeyError("planted")

    target = Target((b'{"a": 1}',), run)
    monkeypatch.setattr("fuzzing.targets.make_targets", lambda: {"json": target})
    with pytest.raises(AssertionError, match="KeyError: 'planted'"):
        make_check("json", 300)()
