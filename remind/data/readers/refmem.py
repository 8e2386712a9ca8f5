"""RefMem-Bench JSON Lines, the toolkit's own format: contexts and questions, one record a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import ImagePathError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Turn
from remind.data.readers.builder import CorpusBuilder, Draft, check_question, check_turn
from remind.data.readers.evidence import exact
from remind.data.readers.source import Place, Source, shown

_TYPES = ("context", "question")


def matches(source: Source) -> bool:
    return source.first.get("type") in _TYPES


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """Contexts become dialogues; images are numbered in order over the whole context. Files of a folder are one corpus:
    a question may be in another file than its context, and before it. Questions come in the order of their contexts.

    A first pass counts the questions of each context; then contexts and questions are read side by side, and a piece is
    a context with its questions. Questions that come before their turn are held.

    Raises:
        DataError: a record of another type or that lacks what it needs, a question whose context is missing.
        ImagePathError: an image that is missing or leaves the folder of its file.
    """
    counts = _count(sources)
    out = CorpusBuilder()
    questions = (item for item in _records(sources) if item[1]["type"] == "question")
    held: dict[str, list[tuple[Place, dict[str, Any]]]] = {}
    for place, record in _records(sources):
        if record["type"] == "question":
            continue
        dialogue = out.add_dialogue(context(place, record))
        own = held.setdefault(dialogue.id, [])
        while len(own) < counts[dialogue.id]:
            if (item := next(questions, None)) is None:
                raise place.error("changed while it was read; try again when nothing writes to it")
            held.setdefault(item[0].name(item[1].get("context_id"), "context_id"), []).append(item)
        for where, question in held.pop(dialogue.id):
            add_question(out, where, question, dialogue)
        yield out.piece()
    out.end(sources)


def _count(sources: Sequence[Source]) -> Counter[str]:
    """Number of questions of each context. Raises DataError for a question id twice or a context that is missing."""
    contexts: set[str] = set()
    first: dict[str, Place] = {}
    places: dict[str, Place] = {}
    counts: Counter[str] = Counter()
    for place, record in _records(sources):
        name = place.name(record.get("id"), "id")
        if record["type"] == "context":
            contexts.add(name)
            continue
        place = place.at(name)
        if name in places:
            raise place.error(f"question id {shown(name)} occurs twice, first in {places[name]}")
        places[name] = place
        context = place.name(record.get("context_id"), "context_id")
        first.setdefault(context, place)
        counts[context] += 1
    for context, place in first.items():
        if context not in contexts:
            raise place.error(f"its dialogue {shown(context)} is missing")
    return counts


def _records(sources: Sequence[Source]) -> Iterator[tuple[Place, dict[str, Any]]]:
    for source in sources:
        for place, value in source.records:
            record = place.mapping(value, "a record")
            if record.get("type") not in _TYPES:
                raise place.error(f"unknown record type {shown(record.get('type'))}; known: {', '.join(_TYPES)}")
            yield place, record


def context(place: Place, record: dict[str, Any]) -> Draft:
    """The dialogue of a context record. Raises DataError and ImagePathError where `stream` does."""
    name = place.name(record.get("id"), "id")
    place = place.at(name)
    draft = Draft(place, name)
    for value in place.sequence(record.get("sessions"), "sessions"):
        session = place.mapping(value, "a session")
        session_id = place.name(session.get("id"), "session id")
        draft.session(session_id, place.optional_text(session.get("time"), "time"))
        for item in place.sequence(session.get("turns"), "turns"):
            turn = place.mapping(item, "a turn")
            turn_id = place.name(turn.get("id"), "turn id")
            where = place.at(turn_id)
            images = [_image(draft, where, image) for image in where.sequence(turn.get("images") or [], "images")]
            time = where.optional_text(turn.get("time"), "time")
            draft.turn(where, turn_id, turn.get("speaker"), turn.get("text"), time, images)
    return draft


def _image(draft: Draft, place: Place, value: object) -> Image:
    image = place.mapping(value, "an image")
    path, caption, source = (place.optional_text(image.get(key), key) for key in ("path", "caption", "source"))
    return draft.image(place, path, caption, source)


def add_question(out: CorpusBuilder, place: Place, record: dict[str, Any], dialogue: Dialogue) -> None:
    """Add the question of a question record about a dialogue of this piece. Raises DataError where `stream` does."""
    name = place.name(record.get("id"), "id")
    place = place.at(name)
    images = place.sequence(record.get("images") or [], "images")
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in images):
        raise place.error("images should be a list of whole numbers")
    category = record.get("category")
    if category is not None and (isinstance(category, bool) or not isinstance(category, int | str)):
        raise place.error("category should be text or a whole number")
    question = Question(
        id=name,
        dialogue_id=dialogue.id,
        text=place.name(record.get("question"), "question"),
        format=record.get("format"),  # type: ignore[arg-type]  # checked by the builder
        options=_texts(place, record, "options"),
        answers=_texts(place, record, "answers"),
        images=tuple(images),
        dimension=place.optional_text(record.get("dimension"), "dimension"),
        category=category,
        time=place.time(record.get("time"), "time"),
        split=place.optional_text(record.get("split"), "split"),
    )
    out.add_question(place, question, exact(_texts(place, record, "evidence"), dialogue.positions))


def _texts(place: Place, record: dict[str, Any], key: str) -> tuple[str, ...]:
    return tuple(place.text(item, key) for item in place.sequence(record.get(key) or [], key))


def write_refmem(corpus: Corpus, path: str | Path) -> None:
    """Write a corpus so that `read(path)` gives it back; evidence that dangles is written too.

    Raises:
        DataError: a turn or question that could not be read back.
        ImagePathError: an image file outside the folder of `path`, which its reader would refuse.
    """
    target = Path(path)
    records = list(_rows(corpus, target))
    for record in records:
        Place(target).text(json.dumps(record, ensure_ascii=False), "a record")
    write_rows(target, records)


def _rows(corpus: Corpus, target: Path) -> Iterator[dict[str, Any]]:
    folder = target.parent.resolve()
    for dialogue in corpus.dialogues:
        place = Place(target, dialogue.id)
        for turn in dialogue.turns:
            check_turn(place.at(turn.id), turn)
        yield {"type": "context", "id": dialogue.id, "sessions": _sessions(dialogue, place, folder)}
    dangling: dict[str, list[str]] = {}
    for lost in corpus.dangling:
        dangling.setdefault(lost.question_id, []).append(lost.reference)
    for question in corpus.questions:
        check_question(Place(target, question.id), question, corpus.dialogue(question.dialogue_id))
        yield {
            "type": "question",
            "id": question.id,
            "context_id": question.dialogue_id,
            "question": question.text,
            "format": question.format,
            "options": question.options,
            "answers": question.answers,
            "evidence": [*question.evidence, *dangling.get(question.id, [])],
            "images": question.images,
            "dimension": question.dimension,
            "split": question.split,
            "category": question.category,
            "time": question.time,
        }


def _sessions(dialogue: Dialogue, place: Place, folder: Path) -> list[dict[str, Any]]:
    """Sessions as records, with image paths relative to `folder`."""

    def image_record(image: Image) -> dict[str, Any]:
        path = None
        if image.path is not None:
            try:
                path = Path(image.path).resolve().relative_to(folder).as_posix()
            except ValueError:
                what = f"image {image.path!r} lies outside {folder}; write the file beside its images"
                raise ImagePathError(what, place.path, place.record) from None
        return {"path": path, "caption": image.caption, "source": image.source}

    def turn_record(turn: Turn) -> dict[str, Any]:
        images = [image_record(image) for image in turn.images]
        return {"id": turn.id, "speaker": turn.speaker, "text": turn.text, "time": turn.time, "images": images}

    return [
        {"id": session.id, "time": session.time, "turns": [turn_record(turn) for turn in session.turns]}
        for session in dialogue.sessions
    ]
