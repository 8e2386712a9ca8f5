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
        name = place.optional_name(record.get("dialogue_id"), "dialogue_id") or f"{place.path.stem}-{number:05d}"
        draft = Draft(place.at(name), name)
        draft.session("S1")
        for turn_id, where, turn in draft.place.turns(record.get("dialogue"), "dialogue", "S1:T{}"):
            images = _images(draft, where, turn)
            draft.turn(where, turn_id, turn.get("speaker"), turn.get("utterance"), images=images)
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
