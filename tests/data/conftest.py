"""Files to read, and the errors with which they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from remind import read
from remind.core.errors import DataError


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes records to a file: JSON Lines for `.jsonl`, else a JSON list."""

    def write(name: str, *records: object) -> Path:
        path = tmp_path / name
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path.write_text(lines if name.endswith(".jsonl") else json.dumps(list(records)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def refused() -> Callable[..., str]:
    """The one-line error with which `read` refuses a file, without the file's name."""

    def message(path: Path, format: str | None = None) -> str:
        with pytest.raises(DataError) as caught:
            read(path, format)
        name, found, told = str(caught.value).partition(str(path))
        assert (name, found, caught.value.path) == ("", str(path), path)
        assert "\n" not in told
        assert len(told) < 500
        return told.lstrip()

    return message
