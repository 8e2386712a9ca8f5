"""RefMem-Bench JSON Lines, the toolkit's own format: contexts and questions, one record a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import ImagePathError, shown
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Dialogue, Image, Question
from remind.data.readers.builder import Draft, Place, check_question, objects

TYPES = ("context", "question")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """Contexts become dialogues; images are numbered in order over the whole context. Files of a folder are one corpus:
    a question may be in another file than its context, and before it. Questions come in the order of their contexts.

    A first pass holds the questions; contexts are read one by one.

    Raises:
        DataError: a record of another type or that lacks what it needs, a question whose context is missing.
        ImagePathError: an image that is missing or leaves the folder of its file.
    """
    asked: dict[str, list[tuple[Place, dict[str, Any]]]] = {}
    for _, place, record in objects(paths, "a record"):
        if record.get("type") not in TYPES:
            raise place.error(f"unknown record type {shown(record.get('type'))}; known: {', '.join(TYPES)}")
        if record["type"] == "question":
            asked.setdefault(place.name(record.get("context_id"), "context_id"), []).append((place, record))
    for _, place, record in objects(paths, "a record"):
        if record.get("type") == "context":
            name = place.name(record.get("id"), "id")
            draft = Draft(place.at(name), name)
            add_sessions(draft, record.get("sessions"))
            for where, question in asked.pop(name, []):
                add_question(draft, where, question)
            yield draft
    for name, questions in asked.items():
        raise questions[0][0].error(f"its dialogue {shown(name)} is missing")


def add_sessions(draft: Draft, value: object) -> None:
    """Add the sessions of a context record. Raises DataError and ImagePathError where `drafts` does."""
    place = draft.place
    for item in place.sequence(value, "sessions"):
        session = place.mapping(item, "a session")
        draft.session(place.name(session.get("id"), "session id"), place.optional_text(session.get("time"), "time"))
        for entry in place.sequence(session.get("turns"), "turns"):
            turn = place.mapping(entry, "a turn")
            turn_id = place.name(turn.get("id"), "turn id")
            where = place.at(turn_id)
            images = [_image(draft, where, image) for image in where.sequence(turn.get("images") or [], "images")]
            draft.turn(where, turn_id, turn.get("speaker"), turn.get("text"), turn.get("time"), images)


def _image(draft: Draft, place: Place, value: object) -> Image:
    image = place.mapping(value, "an image")
    path, caption, source = (place.optional_text(image.get(key), key) for key in ("path", "caption", "source"))
    return draft.image(place, path, caption, source)


def add_question(draft: Draft, place: Place, record: dict[str, Any]) -> None:
    """Add the question of a question record. Raises DataError where `drafts` does."""
    name = place.name(record.get("id"), "id")
    place = place.at(name)
    images = place.sequence(record.get("images") or [], "images")
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in images):
        raise place.error("images should be a list of whole numbers")
    category = record.get("category")
    if category is not None and (isinstance(category, bool) or not isinstance(category, int | str)):
        raise place.error("category should be text or a whole number")
    options, answers = (
        tuple(place.text(item, key) for item in place.sequence(record.get(key) or [], key))
        for key in ("options", "answers")
    )
    evidence = tuple(place.name(item, "evidence") for item in place.sequence(record.get("evidence") or [], "evidence"))
    question = Question(
        id=name,
        dialogue_id=draft.id,
        text=place.name(record.get("question"), "question"),
        format=record.get("format"),  # type: ignore[arg-type]  # checked by the draft
        options=options,
        answers=answers,
        images=tuple(images),
        dimension=place.optional_text(record.get("dimension"), "dimension"),
        category=category,
        time=place.time(record.get("time"), "time"),
        split=place.optional_text(record.get("split"), "split"),
    )
    draft.question(place, question, draft.exact(evidence))


def write_refmem(corpus: Corpus, path: str | Path) -> None:
    """Write a corpus so that `read(path)` gives it back; evidence that dangles is written too.

    Raises:
        DataError: a turn or question that could not be read back.
        ImagePathError: an image file outside the folder of `path`, which its reader would refuse.
    """
    write_rows(path, _rows(corpus, Path(path)))


def _rows(corpus: Corpus, target: Path) -> Iterator[dict[str, Any]]:
    for dialogue in corpus.dialogues:
        record: dict[str, Any] = {"type": "context", "id": dialogue.id, "sessions": _sessions(dialogue, target)}
        Place(target, dialogue.id).text(json.dumps(record, ensure_ascii=False), "a record")
        yield record
    dangling: dict[str, list[str]] = {}
    for lost in corpus.dangling:
        dangling.setdefault(lost.question_id, []).append(lost.reference)
    for question in corpus.questions:
        place = Place(target, question.id)
        check_question(place, question, len(corpus.dialogue(question.dialogue_id).images))
        record = {
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
        place.text(json.dumps(record, ensure_ascii=False), "a record")
        yield record


def _sessions(dialogue: Dialogue, target: Path) -> list[dict[str, Any]]:
    """Sessions as records, with image paths relative to the folder of `target`."""
    folder = target.parent.resolve()
    sessions = []
    for session in dialogue.sessions:
        turns = []
        for turn in session.turns:
            place = Place(target, dialogue.id).at(turn.id)
            if not turn.speaker.strip() or not (turn.text.strip() or turn.images):
                raise place.error("a turn needs a speaker, and words or images")
            images = []
            for image in turn.images:
                path = None if image.path is None else Path(image.path).resolve()
                if path is not None and not path.is_relative_to(folder):
                    what = f"image {image.path!r} lies outside {folder}; write the file beside its images"
                    raise ImagePathError(what, place.path, place.record)
                inside = None if path is None else path.relative_to(folder).as_posix()
                images.append({"path": inside, "caption": image.caption, "source": image.source})
            row = {"id": turn.id, "speaker": turn.speaker, "text": turn.text, "time": turn.time, "images": images}
            turns.append(row)
        sessions.append({"id": session.id, "time": session.time, "turns": turns})
    return sessions
