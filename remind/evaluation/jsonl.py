"""Rows of JSON, one line each, appended as they come, so that a killed run loses at most the line being written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from remind.core.errors import DataError
from remind.core.files import atomic_path, unique_keys


def read_rows(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and row of a file; none if it is missing. A last line without its line end is cut off.

    Args:
        what: what a row is, for errors.

    Raises:
        DataError: any other line that is not a JSON object with a question_id, or that names a key twice.
    """
    if not path.exists():
        return
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        # byte by byte, so that a damaged line stays one
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
            raise bad_row(path, number, what)
        yield number, row


def bad_row(path: Path, number: int, what: str) -> DataError:
    return DataError(f"not {what} of an evaluation; set overwrite to start again", path, f"line {number}")


def put_row(file: TextIO, row: Mapping[str, Any]) -> None:
    """Append a row and hand it to the system."""
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
