"""REALTALK: real chats over 21 days, one file a pair of people (Lee et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from remind.data.dialogue import Corpus, Image, Question
from remind.data.readers.builder import CorpusBuilder, Draft
from remind.data.readers.evidence import EvidenceIndex, written
from remind.data.readers.images import find_file
from remind.data.readers.locomo import answers_of, category_of, is_session, sessions
from remind.data.readers.source import Place, Source

_TIME_FORMAT = "%d.%m.%Y, %H:%M:%S"
_OPTIMISED = re.compile(r"_opt(?=\.[^.]*$|$)")


def matches(source: Source) -> bool:
    return any(isinstance(value, list) and is_session(key) for key, value in source.first.items())


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per file, its id the file's name without suffix; questions `<dialogue id>-q<NNN>` from 000.

    A turn stands in the session that lists it: its `dia_id` names another one in many files. A piece is one file.

    Raises:
        DataError: a record that lacks what it needs, a session under two keys or under one that is no session's.
        ImagePathError: a photo whose name is a path, or that leaves the folder of the file. One that is not there is no
            error: the chats are usually without their photos.
    """
    out = CorpusBuilder()
    for source in sources:
        for place, value in source.records:
            _chat(out, place, source.path.stem, place.mapping(value, "a chat"))
            yield out.piece()
    out.end(sources)


def _chat(out: CorpusBuilder, place: Place, dialogue_id: str, chat: dict[str, Any]) -> None:
    draft = Draft(place.at(dialogue_id), dialogue_id)
    for listed in sessions(place, chat):
        draft.session(listed.id, _iso_time(listed.time))
        for turn in listed.turns:
            _turn(draft, listed.place, turn)
    dialogue = out.add_dialogue(draft)
    index = EvidenceIndex([turn.id for turn in dialogue.turns])
    for number, item in enumerate(place.sequence(chat.get("qa", []), "qa")):
        question_id = f"{dialogue_id}-q{number:03d}"
        where = place.at(question_id)
        item = where.mapping(item, "a question")
        question = Question(
            id=question_id,
            dialogue_id=dialogue_id,
            text=where.name(item.get("question"), "question"),
            answers=answers_of(where, item),
            category=category_of(where, item),
        )
        out.add_question(where, question, index.resolve(written(where, item.get("evidence"))))


def _turn(draft: Draft, place: Place, value: object) -> None:
    turn = place.mapping(value, "a turn")
    turn_id = place.name(turn.get("dia_id"), "dia_id")
    place = place.at(turn_id)
    time = _iso_time(place.optional_text(turn.get("date_time"), "date_time"))
    draft.turn(place, turn_id, turn.get("speaker"), turn.get("clean_text"), time, _images(draft, place, turn))


def _images(draft: Draft, place: Place, turn: dict[str, Any]) -> list[Image]:
    """One image per photo: the files list each photo twice, as sent and as an `_opt` copy."""
    caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
    files = [place.text(name, "img_file") for name in place.sequence(turn.get("img_file") or [], "img_file")]
    photos: dict[str, list[str]] = {}
    for name in files:
        photos.setdefault(_OPTIMISED.sub("", name), []).append(name)
    images: list[Image] = []
    for original, copies in photos.items():
        copies.sort(key=lambda name: name != original)
        found = next(filter(None, (find_file(place, name) for name in copies)), None)
        images.append(draft.image(place, found, None if images else caption, copies[0]))
    if images:
        return images
    urls = [place.text(url, "img_url") for url in place.sequence(turn.get("img_url") or [], "img_url")]
    images = [draft.image(place, None, caption if number == 0 else None, url) for number, url in enumerate(urls)]
    if caption and not images:
        images = [draft.image(place, caption=caption)]
    return images


def _iso_time(text: str | None) -> str | None:
    """ "29.12.2023, 22:42:04" as 2023-12-29T22:42:04; other words as they are."""
    if text is None:
        return None
    try:
        return datetime.strptime(text.strip(), _TIME_FORMAT).isoformat(timespec="seconds")
    except ValueError:
        return text
