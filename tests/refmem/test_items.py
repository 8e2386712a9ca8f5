"""Item files: what is written is read back; a record of another kind is named, not used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import HOSTILE, item

from remind.core.errors import DataError
from remind.refmem.items import read_items, read_rows, write_items

ITEMS = [item("one"), item("two", "multi", question=HOSTILE[3], images=(0, 2)), item("three", "direct")]


def test_items_are_read_back_equal(tmp_path: Path) -> None:
    for items in (ITEMS, ITEMS[:1], []):
        write_items(tmp_path / "i.jsonl", items)
        assert read_items(tmp_path / "i.jsonl") == items
    # what is not an item's own is left out, and what need not be there may be missing
    (tmp_path / "i.jsonl").write_text(json.dumps({k: v for k, v in asdict(ITEMS[0]).items() if v} | {"more": [1]}))
    assert read_items(tmp_path / "i.jsonl") == ITEMS[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": []}, "id should be text, not a list"),
        ({"id": {}}, "id should be text, not an object"),
        ({"id": True}, "id should be text, not true or false"),
        ({"id": None}, "id is missing or blank"),
        ({"id": "\ud800"}, "half a character"),
        ({"id": "one"}, "its id stands twice"),
        ({"question": 1.5}, "question should be text"),
        ({"branch": "sound"}, "unknown branch 'sound'"),
        ({"evidence": {"t1": 1}}, "evidence should be a list, not an object"),
        ({"evidence": "T20"}, "evidence should be a list, not text"),
        ({"evidence": [None]}, "an entry of evidence should be text"),
        ({"options": ["a", "b", "c", ["d"]]}, "an entry of options should be text, not a list"),
        ({"images": ["x"]}, "images should be a list of image indices"),
        ({"images": [-1]}, "images should be a list of image indices"),
        ({"images": [True]}, "images should be a list of image indices"),
        ({"made_by": 5}, "made_by should be text"),
        ({"answers": ["E"]}, "an answer that is no option"),
    ],
)
def test_a_record_of_another_kind_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "i.jsonl"
    rows = [asdict(ITEMS[0]), {**asdict(ITEMS[1]), **change}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message) as caught:
        read_items(path)
    assert str(caught.value).startswith(f"{path} [line 2")


@pytest.mark.parametrize("read", [read_items, read_rows])
def test_files_that_hold_none(tmp_path: Path, read: Any) -> None:
    with pytest.raises(DataError, match="not a regular file"):
        read(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "gone.jsonl")
    path = tmp_path / "i.jsonl"
    path.write_text('{"id": "a",' + json.dumps(asdict(ITEMS[0]))[1:])
    with pytest.raises(DataError, match="the key 'id' occurs twice"):
        read(path)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read(path)
