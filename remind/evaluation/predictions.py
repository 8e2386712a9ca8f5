"""An evaluation's folder and the outputs in it: one JSON line per question, so that a killed run resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, write_json, write_rows
from remind.evaluation.conditions import Prompt
from remind.evaluation.jsonl import bad_row, put_row, read_rows
from remind.models.generate import Failure, Generation

IDENTITY = "run.json"
PREDICTIONS = "predictions.jsonl"
VERDICTS = "verdicts.jsonl"
REPORTS = ("report.json", "report.html", "report.md")
_FORMAT = "remind-evaluation"
_TYPES = {"text": str, "prompt_tokens": int, "new_tokens": int, "finished": bool, "message": str}
#: Failures that another try may mend.
PASSING = ("error", "server", "refused")


@dataclass(frozen=True)
class Prediction:
    """An output, and what the prompt it answers showed.

    Attributes:
        prompt: sixteen hex digits of the prompt's SHA-256.
        evidence, images: gold evidence in the prompt. cut_turns: as in `Prompt`.
        left_out: why the question takes no part, or None.
    """

    output: Generation
    prompt: str = ""
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    cut_turns: int = 0
    left_out: str | None = None


def predicted(prompt: Prompt, output: Generation) -> Prediction:
    """An output with what its prompt showed."""
    return Prediction(
        output, prompt_hash(prompt), prompt.evidence, prompt.images, prompt.cut_turns, left_out=prompt.left_out
    )


def prompt_hash(prompt: Prompt) -> str:
    return hashlib.sha256((prompt.reply or prompt.text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prediction_row(question_id: str, item: Prediction) -> dict[str, Any]:
    """The row of a prediction: what `RunFolder.read` reads."""
    return {
        "question_id": question_id,
        **asdict(item.output),
        "prompt": item.prompt,
        "evidence_shown": list(item.evidence),
        "images_shown": list(item.images),
        "cut_turns": item.cut_turns,
        "left_out": item.left_out,
    }


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
        self.verdicts = self.folder / VERDICTS
        self.identity: Mapping[str, Any] = identity
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; out must be a folder")
        if overwrite:
            for name in (IDENTITY, PREDICTIONS, VERDICTS, "config.yaml", *REPORTS):
                (self.folder / name).unlink(missing_ok=True)
        elif (self.folder / IDENTITY).exists():
            self._check(identity)
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} holds files of something else; choose another out (overwrite writes beside them)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / IDENTITY, {"format": _FORMAT, "identity": identity})

    @classmethod
    def reopen(cls, folder: str | Path, known: Mapping[str, Any]) -> RunFolder:
        """A folder that an earlier stage claimed, with the identity it was claimed for.

        Args:
            known: the part of the identity that is known now.

        Raises:
            ConfigError: no earlier stage was here, or it differs in what is known.
        """
        path = Path(folder) / IDENTITY
        if not path.is_file():
            raise ConfigError(f"{folder} holds no answers; run stage answer first")
        there = read_json(path)
        before = there.get("identity") if isinstance(there, dict) else None
        merged = {**before, **known} if isinstance(before, dict) else dict(known)
        return cls(folder, merged)

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

    def read(self, again: Sequence[str] = PASSING) -> dict[str, Prediction]:
        """The outputs so far, by question id.

        A last line without its line end is the trace of a killed run and is dropped.

        Args:
            again: failures to leave out, so that they are tried again.

        Raises:
            DataError: any other line that is not an output.
        """
        found: dict[str, Prediction] = {}
        try:
            for number, row in read_rows(self.path, "an output"):
                item = _prediction(row)
                if item is None:
                    raise bad_row(self.path, number, "an output")
                if item.output.failure is None or item.output.failure not in again:
                    found[row["question_id"]] = item
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", self.path) from None
        return found

    def append(self) -> TextIO:
        """The predictions file, open for `put`."""
        return self.path.open("a", encoding="utf-8")

    def rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the predictions by the final rows, which hold at least what `put` writes."""
        write_rows(self.path, rows)


def put(file: TextIO, question_id: str, item: Prediction) -> None:
    """Append one prediction and hand it to the system, so that only a line being written can be lost."""
    put_row(file, prediction_row(question_id, item))


def _prediction(row: Mapping[str, Any]) -> Prediction | None:
    failure = row.get("failure")
    if failure not in (None, *get_args(Failure)) or any(
        type(row.get(name)) is not kind for name, kind in _TYPES.items()
    ):
        return None
    output = Generation(failure=failure, **{name: row[name] for name in _TYPES})
    evidence, images, cut = row.get("evidence_shown", []), row.get("images_shown", []), row.get("cut_turns", 0)
    left_out, prompt = row.get("left_out"), row.get("prompt", "")
    fine = _all_of(evidence, str) and _all_of(images, int) and type(cut) is int and isinstance(prompt, str)
    if not fine or not isinstance(left_out, str | None):
        return None
    texts = (row["question_id"], output.text, output.message, prompt, left_out or "", *evidence)
    if not all(map(_encodes, texts)):
        return None
    return Prediction(output, prompt, tuple(evidence), tuple(images), cut, left_out)


def _all_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _encodes(text: str) -> bool:
    """Whether it can be written again: JSON can spell half a character, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
