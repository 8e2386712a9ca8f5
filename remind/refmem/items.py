"""Draft items as JSON Lines: written by a chat model, filtered, annotated, and turned into a benchmark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from remind.core.errors import DataError
from remind.core.files import sha256_json, write_rows
from remind.data.dialogue import DIMENSIONS, Corpus, Dialogue, Format, Question
from remind.data.readers.builder import Place, records
from remind.states.pyramid import LETTERS
from sae.ranges import NonNegativeInt

T = TypeVar("T")


def _told(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


#: A text that is not blank, and lists without repeats, as files hold them.
Text = Annotated[str, AfterValidator(_told)]
Texts = Annotated[tuple[Text, ...], AfterValidator(_distinct)]
ImageIndices = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_distinct)]


@dataclass(frozen=True)
class Item:
    """A question with its evidence, before annotation.

    Attributes:
        answers: letters for single and multi, acceptable phrases for direct.
        candidates: direct only: answers shown to annotators, including the accepted ones.
        evidence: turn ids. images: image indices.
        made_by: the chat model that wrote it. prompt_id: name and hash of the template.
    """

    id: Text
    dialogue_id: Text
    cluster_id: Text
    branch: Literal["text", "image"]
    dimension: str
    format: Format
    question: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    images: ImageIndices = ()
    made_by: str = ""
    prompt_id: str = ""

    @property
    def gold(self) -> tuple[str, ...]:
        """The correct option texts, or the acceptable phrases."""
        if self.format == "direct":
            return self.answers
        return tuple(self.options[LETTERS.index(letter)] for letter in self.answers)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over what annotators see, to detect annotations of another build.

        The generated answer is not part of it: otherwise answers could be guessed by comparing hashes.
        """
        shown = [self.id, self.dialogue_id, self.dimension, self.format, self.question, list(self.options)]
        return sha256_json([*shown, sorted(self.candidates), sorted(self.evidence), sorted(self.images)])[:16]

    def problem(self) -> str | None:
        """Why this is not a valid item of its format; None if it is."""
        if self.dimension not in DIMENSIONS:
            return "unknown dimension"
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
    if not item.options:
        return item
    order = list(range(len(item.options)))
    Random(f"{key}:{item.id}").shuffle(order)
    letters = sorted(LETTERS[order.index(LETTERS.index(letter))] for letter in item.answers)
    return replace(item, options=tuple(item.options[place] for place in order), answers=tuple(letters))


def anchors_missing(item: Item, dialogue: Dialogue) -> bool:
    """Whether the item has no evidence at all, or names a turn or image that the dialogue lacks."""
    turns = all(turn in dialogue.positions for turn in item.evidence)
    images = all(index < len(dialogue.images) for index in item.images)
    return not (item.evidence or item.images) or not turns or not images


def dialogue_of(item: Item, corpus: Corpus, path: str | Path | None = None) -> Dialogue:
    """The dialogue of an item. Raises DataError where that or the item's evidence is missing."""
    dialogue = corpus.dialogue(item.dialogue_id)
    if anchors_missing(item, dialogue):
        raise DataError("it has no evidence, or some that is not in the dialogue", path, item.id)
    return dialogue


def read_records(path: str | Path, kind: TypeAdapter[T]) -> Iterator[tuple[Place, T]]:
    """The records of a JSONL file, if any, each with its place; other fields are ignored.

    Raises:
        DataError: a file that cannot be read, or a record that is not of the kind.
    """
    for place, value in records(path):
        try:
            record = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise place.error(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from None
        yield place, record


def write_items(path: str | Path, items: Sequence[Item]) -> None:
    """Items as JSONL."""
    write_rows(path, (asdict(item) for item in items))


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL file. An empty file has none.

    Raises:
        DataError: as `read_records`; an item that is not valid in its format, or repeats an id.
    """
    items: dict[str, Item] = {}
    for place, item in read_records(path, TypeAdapter(Item)):
        if (problem := item.problem()) is not None:
            raise place.at(item.id).error(problem)
        if item.id in items:
            raise place.at(item.id).error("its id occurs twice")
        items[item.id] = item
    return list(items.values())
