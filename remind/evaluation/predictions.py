"""An evaluation's folder and the outputs in it: one JSON line per question, so that a killed run resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from remind.core import run_folder
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, unique_keys, write_json

if TYPE_CHECKING:
    from remind.evaluation.conditions import Prompt
    from remind.models.generate import Generation

IDENTITY = "run.json"
PREDICTIONS = "predictions.jsonl"
#: Folder in which memory systems keep banks and what they found.
MEMORY = "memory"
#: report.md is what earlier versions wrote beside the page.
REPORTS = ("report.json", "report.html", "report.md")
_FORMAT = "remind-evaluation"
_TYPES = {"text": str, "prompt_tokens": int, "new_tokens": int, "finished": bool, "message": str}
#: Failures that another try may mend.
PASSING = ("error", "server", "refused", "unasked")
#: Failures that say nothing about the model's answer: none came, or the judge decided nothing. All others are wrong.
NO_VERDICT = ("error", "server", "judge", "unasked")


# JSON lines, appended one by one, so that a killed run loses at most the line being written. Readers may come at any
# time and change nothing; writers hold the folder (`held`)


def parse_lines(content: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and row of every line; None for one that is no JSON object with a question_id, or names a key twice."""
    # at line feeds only: a line of a dialogue may hold other characters that end lines in Python
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            row = None
        yield number, row if isinstance(row, dict) and isinstance(row.get("question_id"), str) else None


def read_rows(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and row of a file; none if it is missing. A last line without its line end is left out.

    Args:
        what: what a row is, for errors.

    Raises:
        DataError: any other line that is not a JSON object with a question_id, or that names a key twice.
    """
    if not path.exists():
        return
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, row in parse_lines(whole) if whole else ():
        if row is None:
            raise bad_row(path, number, what)
        yield number, row


def bad_row(path: Path, number: int, what: str) -> DataError:
    return DataError(f"not {what} of an evaluation; set overwrite to start again", path, f"line {number}")


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that appends a row and hands it to the system. A last line without its line end is cut off first."""
    with path.open("a", encoding="utf-8") as file:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

        def put(row: Mapping[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield put


class Prediction(NamedTuple):
    """A row on disk: an output, sixteen hex digits of its prompt's SHA-256, and what the prompt showed.

    Attributes:
        evidence, images, cut_turns, left_out: as in `Prompt`.
    """

    output: Generation
    prompt: str
    evidence: tuple[str, ...] | None
    images: tuple[int, ...] | None
    cut_turns: int
    left_out: str | None

    def row(self, question_id: str) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        return {
            "question_id": question_id,
            **asdict(self.output),
            "prompt": self.prompt,
            "evidence_shown": self.evidence,
            "images_shown": self.images,
            "cut_turns": self.cut_turns,
            "left_out": self.left_out,
        }


def prompt_hash(prompt: Prompt, files: Sequence[str] = ()) -> str:
    """Of what the model is shown, or of what stands in place of its output.

    Args:
        files: hashes of its image files.
    """
    fixed = prompt.output
    shown = [prompt.text, *files] if fixed is None else ["", fixed.text, fixed.message]
    # escaped: a lone surrogate in a dialogue has no bytes of its own
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


@contextmanager
def held(folder: Path, overwrite: bool) -> Iterator[None]:
    """Keep other evaluations out of a folder.

    Raises:
        ConfigError: another process is at work there, or the folder holds something else.
    """
    _check_foreign(folder, overwrite)  # where nothing is written, not even a lock
    with run_folder.RunFolder(folder).held():
        yield


def _check_foreign(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; out must be a folder")
    if overwrite or not folder.exists() or (folder / IDENTITY).exists():
        return
    if any(not file.name.startswith(".") and file.name != MEMORY for file in folder.iterdir()):
        raise ConfigError(f"{folder} holds files of something else; choose another out (overwrite writes beside them)")


class RunFolder:
    """An evaluation's output folder, claimed for one identity.

    Args:
        folder: made if missing.
        identity: everything that decides the outputs (a JSON object).
        overwrite: drop what the folder's earlier run left instead of refusing or resuming.

    Raises:
        ConfigError: the folder holds another run, or files that are no run.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], overwrite: bool = False) -> None:
        self.folder = Path(folder)
        self.path = self.folder / PREDICTIONS
        self.identity: Mapping[str, Any] = identity
        _check_foreign(self.folder, overwrite)
        if overwrite:
            old = [self.folder / name for name in (IDENTITY, PREDICTIONS, "config.yaml", *REPORTS)]
            for file in (*old, *self.folder.glob(part_name("*"))):
                file.unlink(missing_ok=True)
        elif (self.folder / IDENTITY).exists():
            self._check(identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / IDENTITY, {"format": _FORMAT, "identity": identity})

    def _check(self, identity: Mapping[str, Any]) -> None:
        content = read_json(self.folder / IDENTITY)
        before = content.get("identity") if isinstance(content, dict) and content.get("format") == _FORMAT else None
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

    def read(self) -> dict[str, Prediction]:
        """The outputs so far by question id; of a question that was answered twice the later.

        A last line without its line end, which a killed run left or a running one is writing, is left out.

        Raises:
            DataError: any other line that is not an output.
        """
        return {row["question_id"]: prediction for row, prediction in _predictions(self.path)}

    def adopt_parts(self) -> None:
        """Move what other processes have answered, for this run or for one that was killed, to predictions.jsonl.

        Raises:
            DataError: a line that is not an output.
        """
        parts = sorted(self.folder.glob(part_name("*")))
        if parts:
            with appending(self.path) as put:
                for row in [row for part in parts for row, _ in _predictions(part)]:
                    put(row)
        for part in parts:
            # a process of a killed run that still writes does so to a file that is gone
            part.unlink()


def part_name(process: int | str) -> str:
    """The file of what a process other than the first answers, in the folder of the run."""
    return f".{PREDICTIONS}.{process}.part"


def _predictions(path: Path) -> Iterator[tuple[dict[str, Any], Prediction]]:
    """Rows and outputs of a file. Raises DataError."""
    try:
        for number, row in read_rows(path, "an output"):
            prediction = _prediction(row)
            if prediction is None:
                raise bad_row(path, number, "an output")
            yield row, prediction
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path) from None


def _prediction(row: Mapping[str, Any]) -> Prediction | None:
    from remind.models.generate import Failure, Generation

    failure = row.get("failure")
    if failure not in (None, *get_args(Failure)) or any(type(row.get(key)) is not kind for key, kind in _TYPES.items()):
        return None
    output, prompt = Generation(failure=failure, **{name: row[name] for name in _TYPES}), row.get("prompt")
    shown = [row.get(name) for name in ("evidence_shown", "images_shown")]
    if not isinstance(prompt, str) or any(not isinstance(one, list | None) for one in shown):
        return None
    try:  # JSON can spell half a character, which UTF-8 could not hold when the row is written again
        "".join((row["question_id"], output.text, output.message)).encode()
    except UnicodeEncodeError:
        return None
    evidence, images = (None if one is None else tuple(one) for one in shown)
    return Prediction(output, prompt, evidence, images, row.get("cut_turns", 0), row.get("left_out"))
