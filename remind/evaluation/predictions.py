"""The outputs of a run on disk: one JSON line per question, appended as they come, so that a killed run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from remind.errors import ConfigError, DataError
from remind.evaluation.answer import Generation
from remind.io import read_json, write_json, write_text

IDENTITY = "run.json"
PREDICTIONS = "predictions.jsonl"
_FORMAT = "remind-evaluation"
_TYPES = {"text": str, "prompt_tokens": int, "new_tokens": int, "finished": bool, "message": str}


class RunFolder:
    """An evaluation's output folder, claimed for one identity.

    Args:
        folder: made if missing.
        identity: everything that decides the outputs and their scores (a JSON object).
        overwrite: drop what the folder's earlier run left instead of refusing or resuming.

    Raises:
        ConfigError: the folder holds another run, or files that are no run.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], overwrite: bool = False) -> None:
        self.folder = Path(folder)
        self.path = self.folder / PREDICTIONS
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; out must be a folder")
        if overwrite:
            for name in (IDENTITY, PREDICTIONS, "config.yaml", "report.json", "report.html", "report.md"):
                (self.folder / name).unlink(missing_ok=True)
        elif (self.folder / IDENTITY).exists():
            self._check(identity)
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} holds files of something else; choose another out (overwrite writes beside them)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / IDENTITY, {"format": _FORMAT, "identity": identity})

    def _check(self, identity: Mapping[str, Any]) -> None:
        there = read_json(self.folder / IDENTITY)
        before = there.get("identity") if isinstance(there, dict) and there.get("format") == _FORMAT else None
        if not isinstance(before, dict):
            raise DataError("not the identity of an evaluation run; choose another out", self.folder / IDENTITY)
        wanted = json.loads(json.dumps(identity))
        differing = sorted(
            key for key in {*before, *wanted} if key not in before or key not in wanted or before[key] != wanted[key]
        )
        if differing:
            raise ConfigError(
                f"{self.folder} holds a run that differs in {', '.join(differing)}; "
                "choose another out, or set overwrite to drop it"
            )

    def read(self) -> dict[str, Generation]:
        """The outputs so far, by question id; errors are left out, so that they are tried again.

        A last line without its line end is the trace of a killed run and is dropped.

        Raises:
            DataError: any other line that is not an output.
        """
        if not self.path.exists():
            return {}
        *lines, rest = self.path.read_bytes().split(b"\n")
        if rest:
            write_text(self.path, "".join(line.decode("utf-8", "replace") + "\n" for line in lines))
        found: dict[str, Generation] = {}
        for number, line in enumerate(lines, start=1):
            question_id, output = _output(line, self.path, number)
            if output.failure != "error":
                found[question_id] = output
        return found

    def append(self) -> TextIO:
        """The predictions file, open for `put`."""
        return self.path.open("a", encoding="utf-8")

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replace the predictions by the final rows, which hold at least what `put` writes."""
        write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def put(file: TextIO, question_id: str, output: Generation) -> None:
    """Append one output and hand it to the system, so that only a line being written can be lost."""
    file.write(json.dumps({"question_id": question_id, **asdict(output)}, ensure_ascii=False) + "\n")
    file.flush()


def _output(line: bytes, path: Path, number: int) -> tuple[str, Generation]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("question_id"), str)
        or row.get("failure") not in (None, "too_long", "error")
        or any(not isinstance(row.get(name), kind) for name, kind in _TYPES.items())
    ):
        raise DataError("not an output of an evaluation; set overwrite to start again", path, f"line {number}")
    return row["question_id"], Generation(failure=row["failure"], **{name: row[name] for name in _TYPES})
