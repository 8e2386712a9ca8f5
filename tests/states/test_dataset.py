"""States on disk: round trip, what `datasets` opens, older and damaged folders, overlap of splits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from small_corpus import talk

from remind.core.errors import DataError, FormatError
from remind.data.dialogue import Question
from remind.states.dataset import (
    check_split,
    features,
    finish,
    iterate_states,
    load_states,
    question_splits,
    read_manifest,
    read_states,
    write_part,
    write_states,
)
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import FACTUAL, Picture, StateRecord, record_of, record_of_row, row_of


def make_record(question_id: str = "q", split: str = "train", dialogue_id: str = "d", **changes: Any) -> StateRecord:
    dialogue = talk(["Ana: line", "Ana: line é😀 | x", "Ana: more", "Ana: lines"], name=dialogue_id)
    gold = {"answers": ("so",), "evidence": ("1:2", "1:4"), "category": 4}
    question = Question(question_id, dialogue_id, "why?", **{**gold, **changes})
    factual = FactualState(dialogue, question, (Segment(0, 2),), Strategy(("think",), entities=("line",)))
    return record_of(ReflectiveState(AttentionalState(factual, ((1, 1),), (0.5, 1.5, -1.0)), "because"), split)


def test_round_trip_and_what_datasets_opens(tmp_path: Path) -> None:
    names = ("a/b c", "é*[1]", "x" * 300, "x" * 299)
    records = [make_record(f"q{n}", "train", name) for n, name in enumerate(names)]
    records += [make_record("b", "test", evidence=("1:1",), answers=(), category=None, dimension="pattern_induction")]
    records[0] = dataclasses.replace(records[0], pictures=(Picture("1:2", 0, "x.png"),), kind=FACTUAL)
    write_states(tmp_path, records, {"note": 1})
    read = {record.question_id: record for record in read_states(tmp_path)}
    assert read == {record.question_id: record for record in records}
    assert read_states(tmp_path, "test") == records[-1:]
    assert read_manifest(tmp_path)["note"] == 1
    assert question_splits(tmp_path) == {record.question_id: record.split for record in records}
    opened = load_dataset(str(tmp_path))
    assert {name: part.num_rows for name, part in opened.items()} == {"train": 4, "test": 1}
    assert all(part.features == features() for part in opened.values())
    assert b"huggingface" in pq.read_schema(next(tmp_path.glob("test-*.parquet"))).metadata
    # pushed and loaded elsewhere it is rows of the same content
    for part in opened.values():
        part.to_json(tmp_path / "copy.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
        assert {row["question_id"]: record_of_row(row) for row in rows}.items() <= read.items()


def test_a_folder_without_x2_has_no_such_column(tmp_path: Path) -> None:
    whole = make_record()
    record = record_of_row({name: value for name, value in row_of(whole).items() if name != "x2"})
    assert record.levels == ("x0", "x1")
    write_states(tmp_path, [record])
    (read,) = read_states(tmp_path)
    assert read == record
    assert "x2" not in load_states(tmp_path)["train"].column_names
    with pytest.raises(DataError, match=r"\[q\]: no level 'x2'; there are x0, x1; build the states with it"):
        read.level("x2")


def test_unfinished_older_or_damaged_folders_are_refused_in_a_line(tmp_path: Path) -> None:
    (name,) = write_part(tmp_path, [make_record()])
    assert name == "train-d.parquet"
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="not a states folder, or not built to its end; make it with"):
            read_states(folder)
    finish(tmp_path, {})
    with pytest.raises(DataError, match="there are: train"):
        read_states(tmp_path, "test")
    manifest = tmp_path / "manifest.json"
    older = {**json.loads(manifest.read_text()), "format_version": 3}
    for text, message in (
        (json.dumps(older), "format version 3, not 4; make them anew: remind build-states"),
        ("{]", "not JSON"),
        ('{"format": "sae"}', "not the manifest"),
    ):
        manifest.write_text(text)
        with pytest.raises((DataError, FormatError), match=message):
            read_states(tmp_path)
    (tmp_path / name).write_bytes(b"PAR1")
    finish(tmp_path, {})
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_states(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def row(level: str | None = None, **changes: Any) -> dict[str, Any]:
    """The row of a record with other values, in it or in one of its levels."""
    made = row_of(make_record())
    return {**made, **changes} if level is None else {**made, level: {**made[level], **changes}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (row("x1", dialogue=(0, 10**6)), "x1: a span lies outside its text"),
        (row("x1", markers=row()["x1"]["markers"][:1]), "or a block of markers is not closed"),
        (row(x0="text"), "column x0: "),
        (row(options=("a",)), "a direct question has 1 options"),
        (row(format="multi", options=("a", "b"), answers=("Z",)), "gold answers Z of 2 options"),
        ({name: value for name, value in row().items() if name != "target"}, "column target: Field required"),
    ],
)
def test_rows_that_are_no_state_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=r"^\[q\]: ") as caught:
        record_of_row(changed)
    assert message in str(caught.value)


def test_shared_evidence_and_questions_that_stand_twice(tmp_path: Path) -> None:
    write_states(tmp_path / "a", [make_record("a"), make_record("b", "test")])
    with pytest.raises(DataError, match="turn 1:2 of d is evidence of training question a too"):
        check_split(tmp_path / "a")
    with pytest.raises(DataError, match="is evidence of training question"):
        read_states(load_states(tmp_path / "a"))
    write_states(tmp_path / "b", [make_record("a"), make_record("a", dialogue_id="e")])
    with pytest.raises(DataError, match=r"b \[a\]: the question occurs twice"):
        list(iterate_states(tmp_path / "b"))
