"""The folder of an evaluation and the rows in it: one JSON line a question, appended as it is answered, so that a
killed run loses at most the line being written. Readers may come at any time; writers hold the folder (`claimed`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, write_json
from remind.core.run_folder import CONFIG, REPORT, RunFolder

IDENTITY = "run.json"
PREDICTIONS = "predictions.jsonl"
#: Folder in which memory systems keep banks and what they found.
MEMORY = "memory"
_FORMAT = "remind-evaluation"
#: Failures that another try may mend.
PASSING = ("error", "server", "refused", "unasked")
#: Failures that say nothing about the model's answer: none came, or the judge decided nothing. All others are wrong.
NO_VERDICT = ("error", "server", "judge", "unasked")


def _named(line: bytes) -> dict[str, Any]:
    """A row. Raises ValueError for what names no question."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
        raise ValueError("no question_id")
    return row


def read_rows(path: Path, what: str, read: Callable[[bytes], Any] = _named) -> Iterator[tuple[int, Any]]:
    """Line number and row of a file; none if it is missing. A last line without its line end is left out.

    Args:
        what: what a row is, for errors.
        read: makes a row of a line; raises ValueError for a line that is none.

    Raises:
        DataError: a line that is no such row.
    """
    # at line feeds only: a line of a dialogue may hold other characters that end lines in Python
    whole, _, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            yield number, read(line)
        except (ValueError, RecursionError):
            problem = f"not {what} of an evaluation; set overwrite to start again"
            raise DataError(problem, path, f"line {number}") from None


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that appends a row and hands it to the system. A last line without its line end is cut off first."""
    with path.open("a", encoding="utf-8") as file:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

        def put(row: Mapping[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield put


def part_name(process: int | str) -> str:
    """The file of what a process answers, in the folder of the run."""
    return f".{PREDICTIONS}.{process}.part" if process else PREDICTIONS


@contextmanager
def claimed(folder: Path, identity: Mapping[str, Any], overwrite: bool = False) -> Iterator[Path]:
    """The folder of a run or condition, in which no other evaluation writes for the time of the block.

    Args:
        folder: made if missing.
        identity: everything that decides the outputs (a JSON object); kept in run.json.
        overwrite: drop what the folder's earlier run left instead of refusing or resuming.

    Raises:
        ConfigError: the folder holds another run, or files that are no run; or another process is at work there.
        DataError: a run.json that is none.
    """
    file, there = folder / IDENTITY, (one.name for one in folder.glob("*"))
    # where nothing is written, not even a lock
    if not (overwrite or file.exists() or all(name.startswith(".") or name == MEMORY for name in there)):
        raise ConfigError(f"{folder} holds files of something else; choose another out (overwrite writes beside them)")
    with RunFolder(folder).held():
        if overwrite:
            for name in (IDENTITY, CONFIG, REPORT, "report.html", PREDICTIONS, part_name("*")):
                for old in folder.glob(name):
                    old.unlink()
        elif file.exists():
            content = read_json(file)
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise DataError("not the identity of an evaluation run; choose another out", file)
            before, after = content["identity"], json.loads(json.dumps(identity))
            if changed := sorted(key for key in {*before, *after} if before.get(key) != after.get(key)):
                what = f"{folder} holds a run that differs in {', '.join(changed)}"
                raise ConfigError(f"{what}; choose another out, or set overwrite to drop it")
        write_json(file, {"format": _FORMAT, "identity": identity})
        yield folder
