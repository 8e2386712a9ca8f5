"""Annotation files: one annotator's decision on one item per line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import DataError, named, shown
from remind.core.files import write_rows
from remind.data.readers.builder import Place, records
from remind.refmem.items import Item, image_indices


@dataclass(frozen=True)
class Row:
    """An annotator's decision on an item.

    Attributes:
        answers: letters for single and multi, phrases for direct; empty only where `remove` is set.
        evidence, images: turn ids and image indices that carry the answer; both empty: evidence was not checked.
        confidence: 1 (guess) to 5 (certain); None only where `remove` is set.
        seconds: time spent on the item.
        fingerprint: `Item.fingerprint` of the item as it was shown; None: unknown.
    """

    item_id: str
    annotator: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    confidence: int | None = None
    remove: bool = False
    note: str = ""
    seconds: float = 0.0
    fingerprint: str | None = None


def write_annotations(rows: Iterable[Row], path: str | Path) -> None:
    """Replace a file by these rows, whole or not at all."""
    write_rows(path, (asdict(row) for row in rows))


def read_annotations(path: str | Path, items: Sequence[Item]) -> list[Row]:
    """The rows of one annotator's file, checked against their items. An empty file has none.

    Raises:
        DataError: a record that is not an annotation, an item twice, two annotators in a file, rows of another build
            (an unknown item, or one that has changed).
    """
    path = Path(path)
    by_id = {item.id: item for item in items}
    rows: dict[str, Row] = {}
    for place, value in records(path):
        row = _row(place, value, by_id)
        if row.item_id in rows:
            raise place.at(row.item_id).error("the item is annotated twice in this file; keep one of the rows")
        rows[row.item_id] = row
    names = sorted({row.annotator for row in rows.values()})
    if len(names) > 1:
        shown_names = ", ".join(map(named, names[:3])) + (", …" if len(names) > 3 else "")
        raise DataError(f"holds rows of several annotators ({shown_names}); one file each", path)
    return list(rows.values())


def _row(place: Place, value: object, items: Mapping[str, Item]) -> Row:
    """A row, checked against the items by id. Raises DataError."""
    record = place.mapping(value, "an annotation")
    name = place.name(record.get("item_id"), "item_id")
    annotator = place.at(name).name(record.get("annotator"), "annotator")
    place = place.at(name)
    remove, confidence, seconds = record.get("remove", False), record.get("confidence"), record.get("seconds", 0.0)
    if not isinstance(remove, bool):
        raise place.error("remove should be true or false")
    if confidence is None and not remove:
        raise place.error("confidence is missing; it is a whole number from 1 to 5")
    if confidence is not None and (type(confidence) is not int or not 1 <= confidence <= 5):
        raise place.error(f"confidence is a whole number from 1 to 5, not {shown(confidence)}")
    # whole numbers may be larger than any float
    if type(seconds) not in (int, float) or not 0 <= seconds <= sys.float_info.max:
        raise place.error("seconds should be a number from 0")
    row = Row(
        item_id=name,
        annotator=annotator,
        answers=_texts(place, record, "answers"),
        evidence=_texts(place, record, "evidence"),
        images=image_indices(place, record.get("images")),
        confidence=confidence,
        remove=remove,
        note=place.optional_text(record.get("note"), "note") or "",
        seconds=float(seconds),
        fingerprint=place.optional_text(record.get("fingerprint"), "fingerprint"),
    )
    item = items.get(row.item_id)
    if item is None:
        raise place.error("no such item: these annotations are of another build; give the items they were made from")
    if row.fingerprint not in (None, item.fingerprint):
        raise place.error("the item has changed: these annotations are of another build")
    if not row.answers and not row.remove:
        raise place.error("answers are missing; skipped items have no row")
    check_answers(place, item, row.answers)
    return row


def _texts(place: Place, record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The distinct texts of a list that may be left out, or null."""
    entries = [] if record.get(key) is None else place.sequence(record[key], key)
    return tuple(dict.fromkeys(place.name(text, key).strip() for text in entries))


def check_answers(place: Place, item: Item, answers: Sequence[str]) -> None:
    """Letters must name options, and single choice has one. Raises DataError."""
    if item.format == "direct":
        return
    wrong = [letter for letter in answers if letter not in list(item.letters)]
    if wrong:
        raise place.error(f"answer {shown(wrong[0])} names no option; they are {', '.join(item.letters)}")
    if item.format == "single" and len(answers) > 1:
        raise place.error(f"a single-choice item has one answer, not {len(answers)}")
