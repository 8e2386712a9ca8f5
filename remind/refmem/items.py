"""Draft items: what generation writes, filters and annotators judge, and a benchmark is made of; JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from remind.core.files import write_rows
from remind.data.dialogue import DIMENSIONS, FORMATS, Dialogue, Question
from remind.data.readers.source import Place, Source, shown
from remind.states.pyramid import LETTERS

BRANCHES = ("text", "image")
_NAMES = ("id", "dialogue_id", "cluster_id", "branch", "dimension", "format", "question")
_LISTS = ("options", "answers", "candidates", "evidence")


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
    """The records of a JSONL file; an empty one has none.

    Raises:
        DataError: a file that cannot be read, a record that is not a JSON object or names a key twice.
    """
    return [place.mapping(value, "a record") for place, value in Source(Path(path)).any_records]


def write_items(path: str | Path, items: Sequence[Item]) -> None:
    """Items as JSONL."""
    write_rows(path, (asdict(item) for item in items))


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL file; fields that are not an item's are left out. An empty file has none.

    Raises:
        DataError: a file that cannot be read, a record that lacks a field or has one of another kind, is no item of its
            format, or has an id that stood before.
    """
    items: dict[str, Item] = {}
    for place, value in Source(Path(path)).any_records:
        item = _item(place, value)
        place = place.at(item.id)
        if (problem := item.problem()) is not None:
            raise place.error(problem)
        if item.id in items:
            raise place.error("its id stands twice")
        items[item.id] = item
    return list(items.values())


def _item(place: Place, value: object) -> Item:
    record = place.mapping(value, "an item")
    place = place.at(place.name(record.get("id"), "id"))
    images = place.sequence(record.get("images", []), "images")
    if not all(type(index) is int and index >= 0 for index in images):
        raise place.error("images should be a list of image indices")
    known: dict[str, Any] = {key: place.name(record.get(key), key) for key in _NAMES}
    if known["branch"] not in BRANCHES:
        raise place.error(f"unknown branch {shown(known['branch'])}; known: {', '.join(BRANCHES)}")
    for key in _LISTS:
        entries = place.sequence(record.get(key, []), key)
        known[key] = tuple(place.text(text, f"an entry of {key}") for text in entries)
    known |= {key: place.text(record.get(key, ""), key) for key in ("made_by", "prompt_id")}
    return Item(**known, images=tuple(images))
