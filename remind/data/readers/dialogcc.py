"""DialogCC: dialogues with images shared in their turns (Lee et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.data.dialogue import Image
from remind.data.readers.builder import Draft, Place, objects


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue of one session (`S1`) per record, turns `S1:T<n>` from 1. URLs are kept as `Image.source`.

    Raises:
        DataError: a record that lacks what it needs.
        ImagePathError: a local image that is missing or leaves the folder of the file.
    """
    for number, place, record in objects(paths, "a dialogue"):
        given = record.get("dialogue_id")
        name = f"{place.path.stem}-{number:05d}" if given is None else place.name(given, "dialogue_id")
        draft = Draft(place.at(name), name)
        draft.session("S1")
        for count, value in enumerate(draft.place.sequence(record.get("dialogue"), "dialogue"), start=1):
            where = draft.place.at(f"S1:T{count}")
            turn = where.mapping(value, "a turn")
            images = _images(draft, where, turn)
            draft.turn(where, f"S1:T{count}", turn.get("speaker"), turn.get("utterance"), images=images)
        yield draft


def _images(draft: Draft, place: Place, turn: dict[str, Any]) -> list[Image]:
    """Shared images are strings, or objects under one of several keys; the turn's `description` is the caption of the
    first if that has none of its own."""
    shared = turn.get("shared_image") or []
    images: list[Image] = []
    for entry in filter(None, shared if isinstance(shared, list) else [shared]):
        fields = {"url": entry} if isinstance(entry, str) else place.mapping(entry, "a shared image")
        described = {} if images else {"alt": turn.get("description")}
        images += filter(None, [draft.shown(place, described | {key: v for key, v in fields.items() if v})])
    return images
