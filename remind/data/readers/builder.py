"""Dialogues and corpora under construction: one place for the checks that all formats share."""

from __future__ import annotations

import string
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from remind.core.errors import DataError
from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus, Dangling, Dialogue, Image, Question, Session, Turn
from remind.data.readers.evidence import Resolved
from remind.data.readers.images import is_remote, local_file
from remind.data.readers.place import Place, shown
from remind.data.readers.source import Source

SPLITS = ("train", "dev", "test")
T = TypeVar("T")


class Draft:
    """A dialogue while it is read. Sessions without turns are left out."""

    def __init__(self, place: Place, dialogue_id: str) -> None:
        self.place = place
        self.id = dialogue_id
        self._sessions: dict[str, tuple[str | None, list[Turn]]] = {}
        self._turns: list[Turn] | None = None
        self._images = 0

    def session(self, session_id: str, time: str | None = None) -> None:
        """Open the session that the next turns belong to. Raises DataError for an id that is taken."""
        if session_id in self._sessions:
            raise self.place.error(f"session id {shown(session_id)} occurs twice")
        self._turns = []
        self._sessions[session_id] = (time, self._turns)

    def image(
        self, place: Place, reference: str | None = None, caption: str | None = None, source: str | None = None
    ) -> Image:
        """The next image of the dialogue. `reference` is a path inside the data folder, or a URL that becomes `source`.

        Raises:
            ImagePathError: see `local_file`.
        """
        path = None
        if reference and is_remote(reference):
            source = source or reference
        elif reference:
            path = local_file(place, reference)
        image = Image(self._images, path, caption, source)
        self._images += 1
        return image

    def turn(
        self,
        place: Place,
        turn_id: str,
        speaker: object,
        text: object,
        time: str | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        """Add a turn to the open session. Raises DataError without speaker, or without text and images."""
        said = "" if text is None else place.text(text, "text")
        turn = Turn(turn_id, place.name(speaker, "speaker"), said, time, tuple(images))
        check_turn(place, turn)
        assert self._turns is not None
        self._turns.append(turn)

    def build(self) -> Dialogue:
        """Raises DataError where `Dialogue` does, with the place."""
        with self.place.located():
            return Dialogue(
                self.id,
                tuple(Session(id_, time, tuple(turns)) for id_, (time, turns) in self._sessions.items() if turns),
            )


class CorpusBuilder:
    """A corpus while its files are read, handed out piece by piece.

    The ids of dialogues are unique over all pieces, and where each stood stays in memory. Those of questions are looked
    at within a piece: most formats number them by dialogue, and the reader of one that does not looks further itself.
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._begin()

    def _begin(self) -> None:
        self._dialogues: dict[str, Dialogue] = {}
        self._questions: dict[str, tuple[Place, Question]] = {}
        self._dangling: list[Dangling] = []
        self._referenced: dict[str, int] = {}

    def add_dialogue(self, draft: Draft) -> Dialogue:
        """Raises DataError for an id that is taken, and where `Draft.build` does."""
        if first := self._places.get(draft.id):
            raise draft.place.error(f"dialogue id {shown(draft.id)} occurs twice, first in {describe(first)}")
        dialogue = draft.build()
        self._dialogues[draft.id] = dialogue
        self._places[draft.id] = draft.place
        return dialogue

    def dialogue(self, place: Place, dialogue_id: str) -> Dialogue:
        """The dialogue of this piece that a question asks about. Raises DataError if it is missing."""
        if dialogue_id not in self._dialogues:
            raise place.error(f"its dialogue {shown(dialogue_id)} is missing")
        return self._dialogues[dialogue_id]

    def add_question(self, place: Place, question: Question, evidence: Resolved | None = None) -> None:
        """Raises DataError for an id that is taken, a missing dialogue, and where `check_question` does."""
        evidence = evidence or Resolved()
        if question.id in self._questions:
            first = self._questions[question.id][0]
            raise place.error(f"question id {shown(question.id)} occurs twice, first in {describe(first)}")
        check_question(place, question, self.dialogue(place, question.dialogue_id))
        self._questions[question.id] = (place, replace(question, evidence=evidence.turn_ids))
        self._dangling.extend(Dangling(question.id, reference) for reference in evidence.dangling)
        if evidence.references:
            self._referenced[question.id] = evidence.references

    def piece(self) -> Corpus:
        """What was added since the last piece."""
        corpus = Corpus(
            tuple(self._dialogues.values()),
            tuple(question for _, question in self._questions.values()),
            tuple(self._dangling),
            sum(self._referenced.values()),
            self._referenced,
        )
        self._begin()
        return corpus

    def end(self, sources: Sequence[Source]) -> None:
        """Raises DataError if the sources held no dialogue."""
        if not self._places:
            raise sources[0].place.error("holds no dialogues")


def complete(place: Place, parts: OrderedDict[str, T], last: Mapping[str, int], name: str, number: int) -> Iterator[T]:
    """Take out, from the front, the parts that no record after `number` adds to.

    Args:
        place: the file. last: the last record of each part, as a first look found it. name: the part of this record.

    Raises:
        DataError: the first look found no such record.
    """
    if last.get(name, -1) < number:
        raise _changed(place)
    while parts and last[next(iter(parts))] <= number:
        yield parts.popitem(last=False)[1]


def check_complete(place: Place, last: Mapping[str, int], number: int) -> None:
    """Raises DataError if a first look found records after `number`, the last one there was."""
    if number < max(last.values(), default=number):
        raise _changed(place)


def _changed(place: Place) -> DataError:
    return place.error("changed while it was read; try again when nothing writes to it")


def describe(place: Place) -> str:
    return place.path.name if place.record is None else f"{place.path.name} [{place.record}]"


def check_turn(place: Place, turn: Turn) -> None:
    """Raises DataError for a blank speaker, or blank text without images."""
    if not turn.speaker.strip():
        raise place.error("speaker is missing or blank")
    if not turn.text.strip() and not turn.images:
        raise place.error("text is missing or blank, and there are no images")


def check_question(place: Place, question: Question, dialogue: Dialogue) -> None:
    """What `Question` promises. No answers at all means that no gold is known.

    Raises:
        DataError: blank text, answer or option; two options alike; unknown format, dimension or split; options with
            "direct" or none without it; an answer that is no letter of an option or stands twice; several answers to
            "single"; an image index out of range.
    """
    if not question.text.strip():
        raise place.error("the question is blank")
    # a blank one would be scored, and nothing could be right
    if question.format == "direct" and not all(answer.strip() for answer in question.answers):
        raise place.error("a gold answer is blank; leave it out where none is known")
    if question.format not in FORMATS:
        raise place.error(f"unknown question format {shown(question.format)}; known: {', '.join(FORMATS)}")
    if question.dimension is not None and question.dimension not in DIMENSIONS:
        raise place.error(f"unknown dimension {shown(question.dimension)}; known: {', '.join(DIMENSIONS)}")
    if question.split is not None and question.split not in SPLITS:
        raise place.error(f"unknown split {shown(question.split)}; known: {', '.join(SPLITS)}")
    if question.format == "direct":
        if question.options:
            raise place.error("a direct question has no options")
    else:
        _check_options(place, question)
    count = len(dialogue.images)
    for index in question.images:
        if not 0 <= index < count:
            what = f"image index {shown(index)} is out of range"
            raise place.error(f"{what}: dialogue {shown(dialogue.id)} has {count} images")


def _check_options(place: Place, question: Question) -> None:
    count = len(question.options)
    if not 1 <= count <= len(string.ascii_uppercase):
        raise place.error(f"a {question.format} question needs 1 to 26 options, not {count}")
    letters = string.ascii_uppercase[:count]
    first: dict[str, str] = {}
    for letter, option in zip(letters, question.options, strict=True):
        if not (words := " ".join(option.split())):
            raise place.error(f"option {letter} is blank")
        if words in first:
            raise place.error(f"options {first[words]} and {letter} are the same")
        first[words] = letter
    for answer in question.answers:
        if len(answer) != 1 or answer not in letters:
            raise place.error(f"answer {shown(answer)} is not the letter of an option (A to {letters[-1]})")
    if len(set(question.answers)) != len(question.answers):
        raise place.error("an answer stands twice")
    if question.format == "single" and len(question.answers) > 1:
        raise place.error(f"a single question has one answer, not {len(question.answers)}")
