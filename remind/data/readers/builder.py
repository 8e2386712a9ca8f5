"""Dialogues and corpora under construction: one place for the checks that all formats share."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remind.core.errors import ImagePathError
from remind.data.dialogue import (
    DIMENSIONS,
    FORMATS,
    SPLITS,
    Corpus,
    Dangling,
    Dialogue,
    Image,
    Question,
    Session,
    Turn,
    problem_of,
)
from remind.data.readers.evidence import Resolved
from remind.data.readers.source import Place, Source, shown

_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


class Draft:
    """A dialogue while it is read. Sessions without turns are left out."""

    def __init__(self, place: Place, dialogue_id: str) -> None:
        self.place = place
        self.id = dialogue_id
        self._sessions: dict[str, tuple[str | None, list[Turn]]] = {}
        self._turns: list[Turn] = []
        self._images = 0

    def session(self, session_id: str, time: str | None = None) -> None:
        """Open the session that the next turns belong to. Raises DataError for an id that is taken, or no such time."""
        if session_id in self._sessions:
            raise self.place.error(f"session id {shown(session_id)} occurs twice")
        self._turns = []
        self._sessions[session_id] = (self.place.time(time, f"the time of session {shown(session_id)}"), self._turns)

    def image(
        self, place: Place, reference: str | None = None, caption: str | None = None, source: str | None = None
    ) -> Image:
        """The next image of the dialogue.

        Args:
            reference: a path inside the data folder, or a URL, which becomes `source` and is never fetched.

        Raises:
            ImagePathError: a path that leaves the folder of the data file, or names no file.
        """
        path = None
        if reference and _REMOTE.match(reference):
            source = source or reference
        elif reference:
            path = _local_file(place, reference)
        image = Image(self._images, path, caption, source)
        self._images += 1
        return image

    def images(self, place: Place, turn: Mapping[str, Any], urls: Sequence[Any]) -> list[Image]:
        """Remote images of a turn by their URLs; `blip_caption` describes the first, or an image without a URL."""
        caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
        sources: list[str | None] = [place.text(url, "img_url") for url in urls]
        if caption and not sources:
            sources = [None]
        return [
            self.image(place, caption=caption if number == 0 else None, source=source)
            for number, source in enumerate(sources)
        ]

    def turn(
        self,
        place: Place,
        turn_id: str,
        speaker: object,
        text: object,
        time: str | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        """Add a turn to the open session. Raises DataError without speaker, or text and images, or for no such time."""
        words = "" if text is None else place.text(text, "text")
        turn = Turn(turn_id, place.name(speaker, "speaker"), words, place.time(time, "time"), tuple(images))
        check_turn(place, turn)
        self._turns.append(turn)

    def build(self) -> Dialogue:
        """Raises DataError where `Dialogue` does, with the place."""
        sessions = tuple(Session(name, time, tuple(turns)) for name, (time, turns) in self._sessions.items() if turns)
        if problem := problem_of(sessions):
            raise self.place.error(problem)
        return Dialogue(self.id, sessions)


def _local_file(place: Place, reference: str) -> str:
    """The absolute path of an image file, links resolved. Raises ImagePathError if it is missing or leaves the folder
    of the data file."""
    folder = place.path.parent.resolve()
    try:
        target = (folder / reference).resolve()
        inside, exists = target.is_relative_to(folder), target.is_file()
    except (OSError, ValueError, RuntimeError):
        raise ImagePathError(f"image {shown(reference)} is not a usable path", place.path, place.record) from None
    if not inside:
        raise ImagePathError(f"image {shown(reference)} is outside the data folder {folder}", place.path, place.record)
    if not exists:
        raise ImagePathError(f"image {shown(reference)}: no such file in {folder}", place.path, place.record)
    return str(target)


class CorpusBuilder:
    """A corpus while its files are read, handed out piece by piece.

    Ids of dialogues are unique over all pieces, and their places stay in memory. Ids of questions are unique if those
    of dialogues are, since formats number questions by dialogue; RefMem-Bench, which does not, checks them itself.
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._begin()

    def _begin(self) -> None:
        self._dialogues: dict[str, Dialogue] = {}
        self._questions: list[Question] = []
        self._dangling: list[Dangling] = []
        self._referenced: dict[str, int] = {}

    def add_dialogue(self, draft: Draft) -> Dialogue:
        """Raises DataError for an id that is taken, and where `Draft.build` does."""
        if first := self._places.get(draft.id):
            raise draft.place.error(f"dialogue id {shown(draft.id)} occurs twice, first in {first}")
        dialogue = self._dialogues[draft.id] = draft.build()
        self._places[draft.id] = draft.place
        return dialogue

    def add_question(self, place: Place, question: Question, evidence: Resolved) -> None:
        """Add a question about a dialogue of this piece. Raises DataError where `check_question` does."""
        check_question(place, question, self._dialogues[question.dialogue_id])
        self._questions.append(replace(question, evidence=evidence.turn_ids))
        self._dangling.extend(Dangling(question.id, reference) for reference in evidence.dangling)
        if evidence.references:
            self._referenced[question.id] = evidence.references

    def piece(self) -> Corpus:
        """What was added since the last piece."""
        corpus = Corpus(
            tuple(self._dialogues.values()),
            tuple(self._questions),
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


def one_per_record(
    sources: Sequence[Source], what: str, add: Callable[[CorpusBuilder, Place, int, dict[str, Any]], None]
) -> Iterator[Corpus]:
    """The pieces of files in which each record is a dialogue with its questions.

    Args:
        what: the record in words, for errors ("a sample").
        add: adds a record, given its place and its number in the file (from 1), to the corpus.

    Raises:
        DataError: a record that is no object, no dialogue at all, and what `add` raises.
    """
    out = CorpusBuilder()
    for source in sources:
        for number, (place, value) in enumerate(source.records, start=1):
            add(out, place, number, place.mapping(value, what))
            yield out.piece()
    out.end(sources)


def check_turn(place: Place, turn: Turn) -> None:
    """Raises DataError for a blank speaker, or blank text without images."""
    if not turn.speaker.strip():
        raise place.error("speaker is missing or blank")
    if not turn.text.strip() and not turn.images:
        raise place.error("text is missing or blank, and there are no images")


def check_question(place: Place, question: Question, dialogue: Dialogue) -> None:
    """Raises DataError for a blank question or gold answer, an unknown format, dimension or split, an image index out
    of range, and options or answers that do not fit the format."""
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
        raise place.error("an answer occurs twice")
    if question.format == "single" and len(question.answers) > 1:
        raise place.error(f"a single question has one answer, not {len(question.answers)}")
