"""Files of items and of annotations: what is written is read back; what is malformed is named, not used."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import HOSTILE, item, row

from remind.core.errors import DataError
from remind.refmem.annotations import read_annotations, write_annotations
from remind.refmem.items import read_items, read_rows, write_items

SINGLE, MULTI, DIRECT = item("one"), item("two", "multi", question=HOSTILE[3], images=(0, 2)), item("three", "direct")
ITEMS = [SINGLE, MULTI, DIRECT]


def test_items_are_read_back_equal(tmp_path: Path) -> None:
    for items in (ITEMS, []):
        write_items(tmp_path / "i.jsonl", items)
        assert read_items(tmp_path / "i.jsonl") == items
    # what is not an item's own is left out, and what need not be there may be missing
    (tmp_path / "i.jsonl").write_text(json.dumps({k: v for k, v in asdict(SINGLE).items() if v} | {"more": [1]}))
    assert read_items(tmp_path / "i.jsonl") == ITEMS[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": []}, "id should be text, not a list"),
        ({"id": None}, "id is missing or blank"),
        ({"id": "\ud800"}, "half a character"),
        ({"id": "one"}, "its id occurs twice"),
        ({"branch": "sound"}, "unknown branch 'sound'"),
        ({"evidence": "T20"}, "evidence should be a list, not text"),
        ({"options": ["a", "b", "c", ["d"]]}, "an entry of options should be text, not a list"),
        ({"images": [-1]}, "images should be a list of image indices"),
        ({"images": [True]}, "images should be a list of image indices"),
        ({"made_by": 5}, "made_by should be text"),
        # each format's own rules
        ({"dimension": "mood"}, "unknown format or dimension"),
        ({"answers": []}, "no answer, or one twice"),
        ({"answers": ["E"]}, "an answer that is no option"),
        ({"options": ["a", "b", "c", "A "]}, "not four different options"),
        ({"format": "single"}, "several answers"),
        ({"format": "direct"}, "a direct item has no options"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "i.jsonl"
    rows = [asdict(SINGLE), {**asdict(MULTI), **change}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message) as caught:
        read_items(path)
    assert str(caught.value).startswith(f"{path} [line 2")


@pytest.mark.parametrize("read", [read_items, read_rows])
def test_files_that_hold_none(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "i.jsonl"
    path.write_text('{"id": "a",' + json.dumps(asdict(SINGLE))[1:])
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "\xff"}\n')
    for name, message in (
        (".", "a file was expected"),
        ("gone.jsonl", "no such file"),
        ("i.jsonl", "the key 'id' occurs twice"),
        ("bytes.jsonl", "codec can.t decode"),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)


def test_rows_are_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    assert read_annotations(path, ITEMS) == []
    rows = [
        row(SINGLE, "Ana", "B", seconds=3.5, note=HOSTILE[2]),
        row(MULTI, "Ana", (), remove=True, confidence=None, evidence=(), images=()),
        row(DIRECT, "Ana", ("a quiet life", HOSTILE[0]), confidence=1, evidence=(), images=(0, 3)),
    ]
    write_annotations(rows, path)
    assert read_annotations(path, ITEMS) == rows
    # the agreed field names, one object a line
    first = json.loads(path.read_text().split("\n")[0])
    names = "item_id annotator answers evidence images confidence remove note seconds fingerprint"
    assert set(first) == set(names.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_id": "gone"}, "another build"),
        ({"fingerprint": "0" * 16}, "another build"),
        ({"answers": ["E"]}, "names no option"),
        ({"answers": ["A", "B"]}, "one answer, not 2"),
        ({"answers": []}, "answers are missing"),
        ({"confidence": 6}, "from 1 to 5"),
        ({"confidence": None}, "confidence is missing"),
        ({"images": ["0"]}, "image indices"),
        ({"remove": "yes"}, "true or false"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": 10**400}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
        ({"confidence": 10**4000}, r"from 1 to 5, not 1\d+\.\.\.\d+$"),
        ({"annotator": " "}, "annotator is missing or blank"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.jsonl"
    good = asdict(row(MULTI, "Ana", "A"))
    path.write_text(json.dumps(good) + "\n" + json.dumps({**asdict(row(SINGLE, "Ana", "B")), **change}) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_annotations(path, ITEMS)
    assert str(path) in str(caught.value)
    assert "line 2" in str(caught.value)


def test_an_item_twice_and_two_annotators_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_annotations([row(SINGLE, "Ana", "B"), row(MULTI, "Ana", "B"), row(SINGLE, "Ana", "C")], path)
    with pytest.raises(DataError, match="twice"):
        read_annotations(path, ITEMS)
    write_annotations([row(SINGLE, "Ana", "B"), row(MULTI, "Ben", "B")], path)
    with pytest.raises(DataError, match="several annotators"):
        read_annotations(path, ITEMS)


def test_the_fingerprint_changes_with_what_is_shown_and_not_with_the_answer() -> None:
    for changed in (
        replace(SINGLE, question="Another?"),
        replace(SINGLE, options=SINGLE.options[::-1]),
        replace(SINGLE, evidence=("T1",)),
        replace(SINGLE, dialogue_id="d2"),
    ):
        assert changed.fingerprint != SINGLE.fingerprint
    assert replace(SINGLE, answers=("C",), made_by="x").fingerprint == SINGLE.fingerprint
    assert replace(DIRECT, candidates=DIRECT.candidates[::-1]).fingerprint == DIRECT.fingerprint
