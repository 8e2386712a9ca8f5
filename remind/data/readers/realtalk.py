"""REALTALK: real chats over 21 days, one file a pair of people (Lee et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from remind.core.errors import ImagePathError
from remind.data.dialogue import Corpus, Image
from remind.data.readers.builder import CorpusBuilder, Draft, one_per_record
from remind.data.readers.locomo import add_questions, is_session, sessions, turn_of
from remind.data.readers.source import Place, Source, shown

_TIME = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4}), (\d{1,2}):(\d{2}):(\d{2})", re.ASCII)
_OPTIMISED = re.compile(r"_opt(?=\.[^.]*$|$)")


def matches(source: Source) -> bool:
    return any(isinstance(value, list) and is_session(key) for key, value in source.first.items())


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per file, its id the file's name without suffix; questions `<dialogue id>-q<NNN>` from 000.

    A turn belongs to the session that lists it: its `dia_id` names another one in many files.

    Raises:
        DataError: a record that lacks what it needs, a session under two keys or under a key that names no session.
        ImagePathError: a photo whose name is a path, or that leaves the folder of the file. A missing photo is no
            error: the chats are usually published without them.
    """
    return one_per_record(sources, "a chat", _chat)


def _chat(out: CorpusBuilder, place: Place, _: int, chat: dict[str, Any]) -> None:
    dialogue_id = place.path.stem
    draft = Draft(place.at(dialogue_id), dialogue_id)
    for listed in sessions(place, chat):
        draft.session(listed.id, _iso_time(listed.time))
        for value in listed.turns:
            where, turn_id, turn = turn_of(listed.place, value)
            time = _iso_time(where.optional_text(turn.get("date_time"), "date_time"))
            images = _images(draft, where, turn)
            draft.turn(where, turn_id, turn.get("speaker"), turn.get("clean_text"), time, images)
    add_questions(out, place, out.add_dialogue(draft), place.sequence(chat.get("qa", []), "qa"))


def _images(draft: Draft, place: Place, turn: dict[str, Any]) -> list[Image]:
    """One image per photo: the files list each photo twice, as sent and as an `_opt` copy."""
    files = [place.text(name, "img_file") for name in place.sequence(turn.get("img_file") or [], "img_file")]
    if not files:
        return draft.images(place, turn, place.sequence(turn.get("img_url") or [], "img_url"))
    caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
    photos: dict[str, list[str]] = {}
    for name in files:
        photos.setdefault(_OPTIMISED.sub("", name), []).append(name)
    images: list[Image] = []
    for original, copies in photos.items():
        copies.sort(key=lambda name: name != original)
        path = next(filter(None, (_photo(place, name) for name in copies)), None)
        images.append(draft.image(place, path, None if images else caption, copies[0]))
    return images


def _photo(place: Place, name: str) -> str | None:
    """The absolute path of a photo beside the chat or in `images/` there, links resolved; None if there is none.

    Raises:
        ImagePathError: a path instead of a plain file name, or a link that leaves the folder of the chat.
    """
    if name in {".", ".."} or any(mark in name for mark in "/\\\0"):
        what = f"image {shown(name)} is not a plain file name; it must not lead out of the folder of the chat"
        raise ImagePathError(what, place.path, place.record)
    root = place.path.parent.resolve()
    for candidate in (root / name, root / "images" / name):
        try:
            target = candidate.resolve()
            exists = target.is_file()
        except (OSError, RuntimeError):  # a name too long for the file system, a link to itself
            return None
        if exists and not target.is_relative_to(root):
            raise ImagePathError(f"image {shown(name)} is outside the data folder {root}", place.path, place.record)
        if exists:
            return str(target)
    return None


def _iso_time(text: str | None) -> str | None:
    """ "29.12.2023, 22:42:04" as 2023-12-29T22:42:04, whether there is such a day or not; other words as they are."""
    match = None if text is None else _TIME.fullmatch(text.strip())
    if match is None:
        return text
    day, month, year, hour, minute, second = match.groups()
    return f"{year}-{month:0>2}-{day:0>2}T{hour:0>2}:{minute}:{second}"
