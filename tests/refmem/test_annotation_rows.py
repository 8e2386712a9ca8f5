"""Annotation files: what is written is read back; what is of another build or malformed is named, not used."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import HOSTILE, item, row

from remind.core.errors import DataError
from remind.refmem.annotate import candidates_for, order_for
from remind.refmem.annotations import read_annotations, write_annotations

SINGLE, MULTI, DIRECT = item("one"), item("two", "multi"), item("three", "direct")
ITEMS = [SINGLE, MULTI, DIRECT]


def test_rows_are_read_back_equal(tmp_path: Path) -> None:
    rows = [
        row(SINGLE, "Ana", "B", seconds=3.5, note=HOSTILE[2]),
        row(MULTI, "Ana", "AC", evidence=(), images=(0, 3)),
        row(DIRECT, "Ana", ("a quiet life", HOSTILE[0]), confidence=1),
    ]
    write_annotations(rows, tmp_path / "a.jsonl")
    assert read_annotations(tmp_path / "a.jsonl", ITEMS) == rows
    # the agreed field names, one object a line
    first = json.loads((tmp_path / "a.jsonl").read_text().split("\n")[0])
    wanted = {"item_id", "annotator", "answers", "evidence", "images", "confidence", "remove", "note", "seconds"}
    assert set(first) == wanted | {"fingerprint"}


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    assert read_annotations(tmp_path / "a.jsonl", ITEMS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_id": "gone"}, "another build"),
        ({"fingerprint": "0" * 16}, "another build"),
        ({"answers": ["E"]}, "names no option"),
        ({"answers": ["AB"]}, "names no option"),
        ({"answers": ["A", "B"]}, "one answer, not 2"),
        ({"answers": []}, "answers are missing"),
        ({"answers": "A"}, "should be a list"),
        ({"confidence": 6}, "from 1 to 5"),
        ({"confidence": True}, "from 1 to 5"),
        ({"confidence": None}, "confidence is missing"),
        ({"images": ["0"]}, "image indices"),
        ({"remove": "yes"}, "true or false"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": 10**400}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
        ({"images": {}}, "images should be a list, not an object"),
        ({"answers": False}, "answers should be a list, not true or false"),
        ({"evidence": ""}, "evidence should be a list, not text"),
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


def test_a_flag_alone_is_a_row(tmp_path: Path) -> None:
    rows = [row(SINGLE, "Ana", (), remove=True, confidence=None, evidence=())]
    write_annotations(rows, tmp_path / "a.jsonl")
    assert read_annotations(tmp_path / "a.jsonl", ITEMS) == rows


def test_an_item_twice_and_two_annotators_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_annotations([row(SINGLE, "Ana", "B"), row(MULTI, "Ana", "B"), row(SINGLE, "Ana", "C")], path)
    with pytest.raises(DataError, match="twice"):
        read_annotations(path, ITEMS)
    with pytest.raises(DataError, match=r"regular file"):
        read_annotations(tmp_path, ITEMS)
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


def test_orders_differ_by_annotator_and_seed_and_hold_everything() -> None:
    items = [item(f"i{n}") for n in range(30)]
    orders = [[one.id for one in order_for(items, *key)] for key in (("Ana", 0), ("Ben", 0), ("Ana", 1))]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(one.id for one in items) for order in orders)
    # the file's own order has no part in it
    assert [one.id for one in order_for(items[::-1], "Ana", 0)] == orders[0]


def test_the_place_of_a_candidate_does_not_give_the_answer_away() -> None:
    places = [0, 0, 0]
    for n in range(600):
        given = item(f"d{n}", "direct")
        places[candidates_for(given, "Ana", 0).index("a quiet life")] += 1
    # it stands first in every draft; 600 draws of 1/3: deviation 11.5
    assert all(abs(n - 200) < 5 * 11.6 for n in places)
