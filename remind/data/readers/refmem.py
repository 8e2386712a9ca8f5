"""RefMem-Bench JSON Lines, the toolkit's own format: contexts and questions, one record a line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from remind.core.errors import ImagePathError
from remind.core.files import atomic_path
from remind.data.dialogue import Corpus, Dialogue, Image, Question
from remind.data.readers.builder import CorpusBuilder, Draft, check_question, check_turn, describe
from remind.data.readers.evidence import exact
from remind.data.readers.source import Place, Source, shown

_TYPES = ("context", "question")


def matches(source: Source) -> bool:
    return source.first.get("type") in _TYPES


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """Contexts become dialogues; images are numbered in order over the whole context. Files of a folder are one corpus:
    a question may stand in another file than its context, and before it.

    The files are read once to see which question asks about which context, then again for the contexts and, beside
    them, for the questions. A piece is one context where the questions come in the order of their contexts.

    Raises:
        DataError: a record of another type or that lacks what it needs, a question whose context is missing.
        ImagePathError: an image that is missing or leaves the folder of its file.
    """
    count, asked = _look_through(sources)
    out = CorpusBuilder()
    contexts, questions = _of_type(sources, "context"), _of_type(sources, "question")
    for some, several in cuts(count, asked):
        for place, record in islice(contexts, some):
            out.add_dialogue(_context(place, record))
        for place, record in islice(questions, several):
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


def _look_through(sources: Sequence[Source]) -> tuple[int, Sequence[int]]:
    """How many contexts there are, and for each question the number of its context. Raises DataError."""
    known: dict[str, int] = {}
    count = 0
    # of the questions, which are many, as little is kept as tells whether all is well
    names: dict[str, int] = {}
    asked, prints = array("q"), array("q")
    for place, record in _of_type(sources):
        name = place.name(record.get("id"), "id")
        if record["type"] == "context":
            known.setdefault(name, count)
            count += 1
        else:
            context = place.at(name).name(record.get("context_id"), "context_id")
            asked.append(names.setdefault(context, len(names)))
            prints.append(hash(name))
    _check_unique(sources, prints)
    if missing := names.keys() - known.keys():
        for place, record in _of_type(sources, "question"):
            context, where = place.name(record["context_id"], "context_id"), place.at(str(record["id"]))
            if context in missing:
                raise where.error(f"its dialogue {shown(context)} is missing")
    number_of = [known[name] for name in names]
    return count, array("q", (number_of[one] for one in asked))


def _check_unique(sources: Sequence[Source], prints: array[int]) -> None:
    """Raises DataError for a question id that occurs twice. `prints`: hashes of all of them."""
    ordered = sorted(prints)
    if not (twice := {one for one, other in pairwise(ordered) if one == other}):
        return
    seen: dict[str, Place] = {}
    for place, record in _of_type(sources, "question"):
        name = place.name(record["id"], "id")
        place = place.at(name)
        if name in seen:
            raise place.error(f"question id {shown(name)} occurs twice, first in {describe(seen[name])}")
        if hash(name) in twice:
            seen[name] = place


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
    known = out.dialogue(place, dialogue_id).positions
    out.add_question(place, question, exact(_texts(place, record, "evidence"), known))


def _texts(place: Place, record: dict[str, Any], key: str) -> tuple[str, ...]:
    return tuple(place.text(item, key) for item in place.sequence(record.get(key) or [], key))


def cuts(contexts: int, asked: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The smallest pieces, as (how many further contexts, how many further questions), in order.

    A piece holds the context of each of its questions, and pieces end to end give contexts and questions in the order
    of the file. Where questions come in the order of their contexts, each context is a piece.

    Args:
        asked: for each question, the number of its context.
    """
    first, last = array("q", [len(asked)]) * (contexts + 1), array("q", [-1]) * contexts
    for question, context in enumerate(asked):
        first[context] = min(first[context], question)
        last[context] = question
    for context in range(contexts - 1, 0, -1):
        first[context] = min(first[context], first[context + 1])
    taken = (0, 0)
    latest = -1
    for context in range(contexts):
        latest = max(latest, last[context])
        # all questions up to the latest one are of contexts up to here
        if latest < first[context + 1]:
            yield context + 1 - taken[0], latest + 1 - taken[1]
            taken = (context + 1, latest + 1)


def write_refmem(corpus: Corpus, path: str | Path) -> None:
    """Write a corpus so that `read(path)` gives it back; evidence that dangles is written too.

    Raises:
        DataError: a turn or question that could not be read back.
        ImagePathError: an image file outside the folder of `path`, which its reader would refuse.
    """
    target = Path(path)
    place = Place(target)
    lines = [
        place.text(json.dumps(record, ensure_ascii=False) + "\n", "a record") for record in _records(corpus, target)
    ]
    with atomic_path(target) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)


def _records(corpus: Corpus, target: Path) -> Iterator[dict[str, Any]]:
    folder = target.parent.resolve()
    for dialogue in corpus.dialogues:
        for turn in dialogue.turns:
            check_turn(Place(target, f"{dialogue.id}, {turn.id}"), turn)
        yield {"type": "context", "id": dialogue.id, "sessions": _sessions(dialogue, target, folder)}
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


def _sessions(dialogue: Dialogue, target: Path, folder: Path) -> list[dict[str, Any]]:
    def image_record(image: Image) -> dict[str, Any]:
        path = None
        if image.path is not None:
            try:
                path = Path(image.path).resolve().relative_to(folder).as_posix()
            except ValueError:
                raise ImagePathError(
                    f"image {image.path!r} lies outside {folder}; write the file beside its images", target, dialogue.id
                ) from None
        return {"path": path, "caption": image.caption, "source": image.source}

    return [
        {
            "id": session.id,
            "time": session.time,
            "turns": [
                {
                    "id": turn.id,
                    "speaker": turn.speaker,
                    "text": turn.text,
                    "time": turn.time,
                    "images": [image_record(image) for image in turn.images],
                }
                for turn in session.turns
            ],
        }
        for session in dialogue.sessions
    ]
