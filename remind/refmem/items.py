"""Draft items: what generation writes, filters and annotators judge, and a benchmark is made of; JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from remind.dialogue import DIMENSIONS, FORMATS, Dialogue, Question
from remind.errors import DataError
from remind.io import write_rows
from remind.pyramid import LETTERS

_LISTS = ("options", "answers", "candidates", "evidence", "images")


@dataclass(frozen=True)
class Item:
    """A question with its evidence, before annotation.

    Attributes:
        branch: "text" or "image".
        answers: letters for single and multi, acceptable phrases for direct.
        candidates: direct only: answers shown to annotators, the accepted ones among them.
        evidence: turn ids. images: image indices.
        made_by: who wrote it. prompt_id: name and hash of the template.
    """

    id: str
    dialogue_id: str
    cluster_id: str
    branch: str
    dimension: str
    format: str
    question: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    made_by: str = ""
    prompt_id: str = ""

    @property
    def gold(self) -> tuple[str, ...]:
        """The correct option texts, or the acceptable phrases."""
        if self.format == "direct":
            return self.answers
        return tuple(self.options[LETTERS.index(letter)] for letter in self.answers)

    def problem(self) -> str | None:
        """Why this is no item of its format; None if it is one."""
        if self.format not in FORMATS or self.dimension not in DIMENSIONS:
            return "unknown format or dimension"
        if not self.question.strip():
            return "no question"
        if not self.answers or len(set(self.answers)) < len(self.answers):
            return "no answer, or one twice"
        if self.format == "direct":
            if self.options or not all(answer.strip() for answer in self.answers):
                return "a direct item has no options and no blank answers"
            return None
        texts = {" ".join(option.lower().split()) for option in self.options}
        if len(self.options) != 4 or len(texts) < 4 or "" in texts:
            return "not four different options"
        if set(self.answers) - set(LETTERS[:4]):
            return "an answer that is no option"
        if self.format == "single" and len(self.answers) != 1:
            return "several answers to a single-choice question"
        return None

    def as_question(self, split: str | None = None) -> Question:
        """The item as the toolkit's question."""
        return Question(
            id=self.id,
            dialogue_id=self.dialogue_id,
            text=self.question,
            format=self.format,  # type: ignore[arg-type]  # checked by `problem`
            options=self.options,
            answers=self.answers,
            evidence=self.evidence,
            images=self.images,
            dimension=self.dimension,
            split=split,
        )


def with_id(item: Item) -> Item:
    """The item under an id that follows from what it asks; the order of its options does not matter.

    The answer has no part in it: annotators see the id, and could try the few answers there are.
    """
    shown = [item.question, sorted(item.options), sorted(item.evidence), sorted(item.images)]
    told = [item.dialogue_id, item.dimension, item.format, *shown]
    return replace(item, id="rm-" + hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12])


def anchors_missing(item: Item, dialogue: Dialogue) -> bool:
    """Whether the item has no evidence at all, or names a turn or image that the dialogue lacks."""
    known = all(turn in dialogue.positions for turn in item.evidence)
    shown = all(0 <= index < len(dialogue.images) for index in item.images)
    return not (item.evidence or item.images) or not known or not shown


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file. Raises DataError naming the line that is not a JSON object."""
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError("no such file", path) from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start})", path) from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError("not a JSON object", path, f"line {number}")
        rows.append(row)
    return rows


def write_items(path: str | Path, items: Sequence[Item]) -> None:
    """Items as JSONL."""
    write_rows(path, (asdict(item) for item in items))


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL file; fields that are not an item's are left out.

    Raises:
        DataError: a record that lacks a field, is no item of its format, or has an id that stood before.
    """
    names = {field.name for field in fields(Item)}
    items: list[Item] = []
    seen: set[str] = set()
    for number, row in enumerate(read_rows(path), start=1):
        try:
            known: dict[str, Any] = {key: tuple(v) if key in _LISTS else v for key, v in row.items() if key in names}
            item = Item(**known)
            problem = item.problem()
        except (TypeError, ValueError, AttributeError):
            problem = "not an item of a build"
        if problem is None and item.id in seen:
            problem = "its id stands twice"
        if problem is not None:
            raise DataError(problem, path, row.get("id") or f"record {number}")
        seen.add(item.id)
        items.append(item)
    return items
