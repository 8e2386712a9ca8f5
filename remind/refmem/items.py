"""Draft items as JSON Lines: written by a chat model, filtered, annotated, and turned into a benchmark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from remind.core.errors import shown
from remind.core.files import sha256_json, write_rows
from remind.data.dialogue import DIMENSIONS, FORMATS, Dialogue, Question
from remind.data.readers.builder import Place, records
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
        candidates: direct only: answers shown to annotators, including the accepted ones.
        evidence: turn ids. images: image indices.
        made_by: the chat model that wrote it. prompt_id: name and hash of the template.
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

    @property
    def letters(self) -> str:
        """The letters of its options; "" for direct items."""
        return LETTERS[: len(self.options)]

    @property
    def fingerprint(self) -> str:
        """16 hex digits over what annotators see, to detect annotations of another build.

        The generated answer is not part of it: otherwise answers could be guessed by comparing hashes.
        """
        shown = [self.id, self.dialogue_id, self.dimension, self.format, self.question, list(self.options)]
        return sha256_json([*shown, sorted(self.candidates), sorted(self.evidence), sorted(self.images)])[:16]

    def problem(self) -> str | None:
        """Why this is not a valid item of its format; None if it is."""
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
        names = ("dialogue_id", "format", "options", "answers", "evidence", "images", "dimension")
        values = {name: getattr(self, name) for name in names}
        return Question(self.id, text=self.question, split=split, **values)


def with_id(item: Item) -> Item:
    """The item with an id derived from its question; the order of its options does not matter.

    The answer is not part of it: annotators see the id and could otherwise try the few possible answers.
    """
    content = [item.question, sorted(item.options), sorted(item.evidence), sorted(item.images)]
    values = [item.dialogue_id, item.dimension, item.format, *content]
    return replace(item, id="rm-" + hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12])


def shuffled(item: Item, key: str) -> Item:
    """The item with its options in an order drawn from `key` and its id."""
    order = list(range(len(item.options)))
    if not order:
        return item
    Random(f"{key}:{item.id}").shuffle(order)
    letters = sorted(LETTERS[order.index(LETTERS.index(letter))] for letter in item.answers)
    return replace(item, options=tuple(item.options[place] for place in order), answers=tuple(letters))


def anchors_missing(item: Item, dialogue: Dialogue) -> bool:
    """Whether the item has no evidence at all, or names a turn or image that the dialogue lacks."""
    turns = all(turn in dialogue.positions for turn in item.evidence)
    images = all(0 <= index < len(dialogue.images) for index in item.images)
    return not (item.evidence or item.images) or not turns or not images


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file, if any. Raises DataError."""
    return [place.mapping(value, "a record") for place, value in records(path)]


def write_items(path: str | Path, items: Sequence[Item]) -> None:
    """Items as JSONL."""
    write_rows(path, (asdict(item) for item in items))


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL file; other fields are ignored. An empty file has none.

    Raises:
        DataError: a file that cannot be read, a record that lacks a field, has one of another type, is not a valid item
            of its format, or repeats an id.
    """
    items: dict[str, Item] = {}
    for place, value in records(path):
        item = _item(place, value)
        place = place.at(item.id)
        if (problem := item.problem()) is not None:
            raise place.error(problem)
        if item.id in items:
            raise place.error("its id occurs twice")
        items[item.id] = item
    return list(items.values())


def _item(place: Place, value: object) -> Item:
    record = place.mapping(value, "an item")
    place = place.at(place.name(record.get("id"), "id"))
    values: dict[str, Any] = {key: place.name(record.get(key), key) for key in _NAMES}
    if values["branch"] not in BRANCHES:
        raise place.error(f"unknown branch {shown(values['branch'])}; known: {', '.join(BRANCHES)}")
    for key in _LISTS:
        entries = place.sequence(record.get(key, []), key)
        values[key] = tuple(place.text(text, f"an entry of {key}") for text in entries)
    values |= {key: place.text(record.get(key, ""), key) for key in ("made_by", "prompt_id")}
    return Item(**values, images=image_indices(place, record.get("images")))


def image_indices(place: Place, value: object) -> tuple[int, ...]:
    """The distinct image indices of a record, which may be left out. Raises DataError."""
    indices = [] if value is None else place.sequence(value, "images")
    if not all(type(index) is int and index >= 0 for index in indices):
        raise place.error("images should be a list of image indices")
    return tuple(dict.fromkeys(indices))
