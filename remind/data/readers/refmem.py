"""RefMem-Bench JSON Lines, the toolkit's own format: contexts and questions, one record a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
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
    a question may be in another file than its context, and before it.

    A first pass finds the context of each question; then contexts and questions are read side by side. A piece is one
    context if the questions come in the order of their contexts.

    Raises:
        DataError: a record of another type or that lacks what it needs, a question whose context is missing.
        ImagePathError: an image that is missing or leaves the folder of its file.
    """
    count, context_of = _first_pass(sources)
    out = CorpusBuilder()
    contexts, questions = _of_type(sources, "context"), _of_type(sources, "question")
    for n_contexts, n_questions in cuts(count, context_of):
        for place, record in islice(contexts, n_contexts):
            out.add_dialogue(_context(place, record))
        for place, record in islice(questions, n_questions):
            _question(out, place, record)
        yield out.piece()
    out.end(sources)


def _of_type(sources: Sequence[Source], wanted: str | None = None) -> Iterator[tuple[Place, dict[str, Any]]]:
    for source in sources:
        for place, value in source.records:
            record = place.mapping(value, "a record")
            kind = record.get("type")
            if kind not in _TYPES:
                raise place.error(f"unknown record type {shown(kind)}; known: {', '.join(_TYPES)}")
            if wanted is None or kind == wanted:
                yield place, record


def _first_pass(sources: Sequence[Source]) -> tuple[int, list[int]]:
    """Number of contexts, and for each question the number of its context.

    Raises:
        DataError: a question id twice, or a question whose context is missing.
    """
    contexts: dict[str, int] = {}
    questions: dict[str, tuple[Place, str]] = {}
    count = 0
    for place, record in _of_type(sources):
        name = place.name(record.get("id"), "id")
        if record["type"] == "context":
            contexts.setdefault(name, count)
            count += 1
            continue
        place = place.at(name)
        if name in questions:
            raise place.error(f"question id {shown(name)} occurs twice, first in {questions[name][0]}")
        questions[name] = (place, place.name(record.get("context_id"), "context_id"))
    for place, context in questions.values():
        if context not in contexts:
            raise place.error(f"its dialogue {shown(context)} is missing")
    return count, [contexts[context] for _, context in questions.values()]


def _context(place: Place, record: dict[str, Any]) -> Draft:
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


def _question(out: CorpusBuilder, place: Place, record: dict[str, Any]) -> None:
    name = place.name(record.get("id"), "id")
    place = place.at(name)
    dialogue_id = place.name(record.get("context_id"), "context_id")
    images = place.sequence(record.get("images") or [], "images")
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in images):
        raise place.error("images should be a list of whole numbers")
    category = record.get("category")
    if category is not None and (isinstance(category, bool) or not isinstance(category, int | str)):
        raise place.error("category should be text or a whole number")
    question = Question(
        id=name,
        dialogue_id=dialogue_id,
        text=place.name(record.get("question"), "question"),
        format=record.get("format"),  # type: ignore[arg-type]  # checked by the builder
        options=_texts(place, record, "options"),
        answers=_texts(place, record, "answers"),
        images=tuple(images),
        dimension=place.optional_text(record.get("dimension"), "dimension"),
        category=category,
        time=place.optional_text(record.get("time"), "time"),
        split=place.optional_text(record.get("split"), "split"),
    )
    turn_ids = out.dialogue(place, dialogue_id).positions
    out.add_question(place, question, exact(_texts(place, record, "evidence"), turn_ids))


def _texts(place: Place, record: dict[str, Any], key: str) -> tuple[str, ...]:
    return tuple(place.text(item, key) for item in place.sequence(record.get(key) or [], key))


def cuts(contexts: int, context_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The smallest pieces, as (number of further contexts, number of further questions), in order.

    A piece holds the context of each of its questions, and pieces end to end give contexts and questions in the order
    of the file.

    Args:
        context_of: for each question, the number of its context.
    """
    # first question of any context from here on, and last question of each context
    first, last = [len(context_of)] * (contexts + 1), [-1] * contexts
    for question, context in enumerate(context_of):
        first[context] = min(first[context], question)
        last[context] = question
    for context in range(contexts - 1, 0, -1):
        first[context] = min(first[context], first[context + 1])
    start = (0, 0)
    latest = -1
    for context in range(contexts):
        latest = max(latest, last[context])
        # all questions up to the latest one are about contexts up to here
        if latest < first[context + 1]:
            yield context + 1 - start[0], latest + 1 - start[1]
            start = (context + 1, latest + 1)


def write_refmem(corpus: Corpus, path: str | Path) -> None:
    """Write a corpus so that `read(path)` gives it back; evidence that dangles is written too.

    Raises:
        DataError: a turn or question that could not be read back.
        ImagePathError: an image file outside the folder of `path`, which its reader would refuse.
    """
    target = Path(path)
    records = list(_records(corpus, target))
    for record in records:
        Place(target).text(json.dumps(record, ensure_ascii=False), "a record")
    write_rows(target, records)


def _records(corpus: Corpus, target: Path) -> Iterator[dict[str, Any]]:
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
