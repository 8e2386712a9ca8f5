"""DialogCC: dialogues with images shared in their turns (Lee et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from remind.data.dialogue import Corpus, Image
from remind.data.readers.builder import CorpusBuilder, Draft, one_per_record
from remind.data.readers.source import Place, Source

_REFERENCES = ("image_url", "url", "image_path", "path", "image", "img_url", "img_path")
_CAPTIONS = ("caption", "image_caption", "description", "alt")


def matches(source: Source) -> bool:
    dialogue = source.first.get("dialogue")
    if not isinstance(dialogue, list):
        return False
    # an empty list is refused later; no other format has a list here
    return not dialogue or any(isinstance(turn, dict) and "utterance" in turn for turn in dialogue)


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue of one session (`S1`) per record, turns `S1:T<n>` from 1. URLs are kept as `Image.source`.

    The first image of a turn takes the turn's `description` if it has no caption of its own.

    Raises:
        DataError: a record that lacks what it needs.
        ImagePathError: a local image that is missing or leaves the folder of the file.
    """
    return one_per_record(sources, "a dialogue", _dialogue)


def _dialogue(out: CorpusBuilder, place: Place, number: int, record: dict[str, Any]) -> None:
    given = record.get("dialogue_id")
    name = f"{place.path.stem}-{number:05d}" if given is None else place.name(given, "dialogue_id")
    place = place.at(name)
    draft = Draft(place, name)
    draft.session("S1")
    for count, turn in enumerate(place.sequence(record.get("dialogue"), "dialogue"), start=1):
        _turn(draft, place.at(f"S1:T{count}"), f"S1:T{count}", turn)
    out.add_dialogue(draft)


def _turn(draft: Draft, place: Place, turn_id: str, value: object) -> None:
    turn = place.mapping(value, "a turn")
    shared = turn.get("shared_image") or []
    description = place.optional_text(turn.get("description"), "description")
    images: list[Image] = []
    for entry in shared if isinstance(shared, list) else [shared]:
        reference, caption = _entry(place, entry)
        if caption is None and not images:
            caption = description or None
        if reference or caption:
            images.append(draft.image(place, reference, caption))
    draft.turn(place, turn_id, turn.get("speaker"), turn.get("utterance"), images=images)


def _entry(place: Place, entry: object) -> tuple[str | None, str | None]:
    """Reference and caption of a shared image: a string, or an object under one of several keys."""
    if isinstance(entry, str):
        return place.text(entry, "shared_image"), None
    fields: dict[str, Any] = place.mapping(entry, "a shared image")
    reference = next((fields[key] for key in _REFERENCES if fields.get(key)), None)
    caption = next((fields[key] for key in _CAPTIONS if fields.get(key)), None)
    return place.optional_text(reference, "the image"), place.optional_text(caption, "the caption")
