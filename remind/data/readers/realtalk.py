"""REALTALK: real chats over 21 days, one file a pair of people (Lee et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.data.dialogue import Image
from remind.data.readers.builder import Draft, Place, image_file, iso_time, objects, time_form
from remind.data.readers.locomo import add_questions, remote_images, sessions

#: "29.12.2023, 22:42:04".
_TIME = time_form(r"{day}\.{month}\.{year}, {hour}:{minute}:{second}")
_OPTIMISED = re.compile(r"_opt(?=\.[^.]*$|$)")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per file, its id the file's name without suffix; questions `<dialogue id>-q<NNN>` from 000.

    A turn belongs to the session that lists it: its `dia_id` names another one in many files.

    Raises:
        DataError: a record that lacks what it needs.
        ImagePathError: a photo that leaves the folder of the file. A missing photo is no error: the chats are usually
            published without them.
    """
    for _, place, chat in objects(paths, "a chat"):
        draft = Draft(place.at(place.path.stem), place.path.stem)
        for session_id, session_time, turns in sessions(place, chat):
            draft.session(session_id, iso_time(session_time, _TIME))
            for where, turn_id, turn in turns:
                time = iso_time(where.optional_text(turn.get("date_time"), "date_time"), _TIME)
                images = _images(draft, where, turn)
                draft.turn(where, turn_id, turn.get("speaker"), turn.get("clean_text"), time, images)
        add_questions(draft, place, chat.get("qa") or [])
        yield draft


def _images(draft: Draft, place: Place, turn: dict[str, Any]) -> list[Image]:
    """One image per photo, which may lie beside the chat or in `images/` there: the files list each photo twice, as
    sent and as an `_opt` copy."""
    photos: dict[str, list[str]] = {}
    for value in place.sequence(turn.get("img_file") or [], "img_file"):
        name = place.text(value, "img_file")
        photos.setdefault(_OPTIMISED.sub("", name), []).append(name)
    if not photos:
        return remote_images(draft, place, turn)
    caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
    images: list[Image] = []
    for original, copies in photos.items():
        copies.sort(key=lambda name: name != original)
        files = (image_file(place, f"{folder}{name}") for name in copies for folder in ("", "images/"))
        path = next(filter(None, files), None)
        images.append(draft.image(place, path, None if images else caption, copies[0]))
    return images
