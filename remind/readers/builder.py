"""Dialogues and corpora under construction: one place for the checks that all formats share."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

from remind.dialogue import DIMENSIONS, FORMATS, Corpus, Dangling, Dialogue, Image, Question, Session, Turn
from remind.readers.evidence import Resolved
from remind.readers.images import is_remote, local_file
from remind.readers.source import Place, Source

SPLITS = ("train", "dev", "test")


class Draft:
    """A dialogue while it is read. Sessions without turns are left out."""

    def __init__(self, place: Place, dialogue_id: str) -> None:
        self.place = place
        self.id = dialogue_id
        self._sessions: list[tuple[str, str | None, list[Turn]]] = []
        self._images = 0

    def session(self, session_id: str, time: str | None = None) -> None:
        """Open the session that the next turns belong to. Raises DataError for an id that is taken."""
        if any(session_id == taken for taken, _, _ in self._sessions):
            raise self.place.error(f"session id {session_id!r} occurs twice")
        self._sessions.append((session_id, time, []))

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
        self._sessions[-1][2].append(turn)

    def build(self) -> Dialogue:
        """Raises DataError where `Dialogue` does, with the place."""
        with self.place.located():
            return Dialogue(
                self.id, tuple(Session(id_, time, tuple(turns)) for id_, time, turns in self._sessions if turns)
            )


class CorpusBuilder:
    """A corpus while its files are read."""

    def __init__(self) -> None:
        self._dialogues: dict[str, tuple[Place, Dialogue]] = {}
        self._questions: dict[str, tuple[Place, Question]] = {}
        self._dangling: list[Dangling] = []
        self._references = 0

    def add_dialogue(self, draft: Draft) -> Dialogue:
        """Raises DataError for an id that is taken, and where `Draft.build` does."""
        if draft.id in self._dialogues:
            first = self._dialogues[draft.id][0]
            raise draft.place.error(f"dialogue id {draft.id!r} occurs twice, first in {_describe(first)}")
        dialogue = draft.build()
        self._dialogues[draft.id] = (draft.place, dialogue)
        return dialogue

    def dialogue(self, place: Place, dialogue_id: str) -> Dialogue:
        """The dialogue a question asks about. Raises DataError if it is missing."""
        if dialogue_id not in self._dialogues:
            raise place.error(f"its dialogue {dialogue_id!r} is missing")
        return self._dialogues[dialogue_id][1]

    def add_question(self, place: Place, question: Question, evidence: Resolved | None = None) -> None:
        """Raises DataError for an id that is taken, a missing dialogue, and where `check_question` does."""
        evidence = evidence or Resolved()
        if question.id in self._questions:
            first = self._questions[question.id][0]
            raise place.error(f"question id {question.id!r} occurs twice, first in {_describe(first)}")
        check_question(place, question, self.dialogue(place, question.dialogue_id))
        self._questions[question.id] = (place, replace(question, evidence=evidence.turn_ids))
        self._dangling.extend(Dangling(question.id, reference) for reference in evidence.dangling)
        self._references += evidence.references

    def corpus(self, sources: Sequence[Source]) -> Corpus:
        """Raises DataError if the sources held no dialogue."""
        if not self._dialogues:
            raise sources[0].place.error("holds no dialogues")
        return Corpus(
            tuple(dialogue for _, dialogue in self._dialogues.values()),
            tuple(question for _, question in self._questions.values()),
            tuple(self._dangling),
            self._references,
        )


def _describe(place: Place) -> str:
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
        DataError: blank text; unknown format, dimension or split; options with "direct" or none without it; an answer
            that is no letter of an option or stands twice; several answers to "single"; an image index out of range.
    """
    if not question.text.strip():
        raise place.error("the question is blank")
    if question.format not in FORMATS:
        raise place.error(f"unknown question format {question.format!r}; known: {', '.join(FORMATS)}")
    if question.dimension is not None and question.dimension not in DIMENSIONS:
        raise place.error(f"unknown dimension {question.dimension!r}; known: {', '.join(DIMENSIONS)}")
    if question.split is not None and question.split not in SPLITS:
        raise place.error(f"unknown split {question.split!r}; known: {', '.join(SPLITS)}")
    if question.format == "direct":
        if question.options:
            raise place.error("a direct question has no options")
    else:
        _check_options(place, question)
    count = len(dialogue.images)
    for index in question.images:
        if not 0 <= index < count:
            raise place.error(f"image index {index} is out of range: dialogue {dialogue.id!r} has {count} images")


def _check_options(place: Place, question: Question) -> None:
    count = len(question.options)
    if not 1 <= count <= len(string.ascii_uppercase):
        raise place.error(f"a {question.format} question needs 1 to 26 options, not {count}")
    letters = string.ascii_uppercase[:count]
    for answer in question.answers:
        if len(answer) != 1 or answer not in letters:
            raise place.error(f"answer {answer!r} is not the letter of an option (A to {letters[-1]})")
    if len(set(question.answers)) != len(question.answers):
        raise place.error("an answer stands twice")
    if question.format == "single" and len(question.answers) > 1:
        raise place.error(f"a single question has one answer, not {len(question.answers)}")
