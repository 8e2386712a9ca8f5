"""States on disk: round trip, versions, damage, overlap of splits."""

import dataclasses
import json
from pathlib import Path

import pytest

from remind.dialogue import Dialogue, Image, Question, Session, Turn
from remind.errors import DataError, FormatError
from remind.pipeline import Tally, evidence_share, record_of
from remind.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states import StateRecord, check_split, part_name, read_manifest, read_states, write_manifest, write_part


def make_record(question_id: str = "q", split: str = "train", **changes: object) -> StateRecord:
    turns = tuple(
        Turn(f"t{n}", "Ana", f"line {n} é😀", images=(Image(0, caption="x"),) if n == 1 else ()) for n in range(4)
    )
    dialogue = Dialogue("d", (Session("s", None, turns),))
    question = Question(question_id, "d", "why?", answers=("so",), evidence=("t1", "t3"), category=4)
    question = dataclasses.replace(question, **changes)  # type: ignore[arg-type]
    factual = FactualState(dialogue, question, (Segment(0, 2),), Strategy(("think",), entities=("line",)))
    return record_of(ReflectiveState(AttentionalState(factual, ((1, 1),), (0.5, 1.5, -1.0)), "because"), split)


def test_round_trip(tmp_path: Path) -> None:
    records = [make_record("a"), make_record("b", "test", evidence=("t0",), answers=(), category=None)]
    write_part(tmp_path, 0, records[:1])
    write_part(tmp_path, 1, records[1:])
    write_manifest(tmp_path, {"note": 1})
    assert read_states(tmp_path) == records
    assert read_states(tmp_path, "test") == records[1:]
    assert read_manifest(tmp_path)["note"] == 1
    assert not list(tmp_path.glob(".*"))


def test_record_says_what_x0_holds() -> None:
    record = make_record()
    assert record.evidence_lines == ("Ana: line 1 é😀", "Ana: line 3 é😀")
    assert record.evidence_found == ("t1",)
    assert evidence_share(record) == 0.5
    tally = Tally()
    tally.add(record)
    tally.add(make_record("b", evidence=()))
    assert tally.recall()["all"] == {"n": 1, "x0": 0.5, "marked": 0.5}
    assert list(tally.recall()) == ["category 4", "all"]


def test_unfinished_foreign_or_newer_folder_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path, 0, [make_record()])
    with pytest.raises(FormatError, match="did not finish"):
        read_states(tmp_path)
    write_manifest(tmp_path, {})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["format_version"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="build them again"):
        read_states(tmp_path)
    (tmp_path / "manifest.json").write_text("{]")
    with pytest.raises(DataError, match="not JSON"):
        read_states(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match="not the manifest"):
        read_states(tmp_path)


def test_truncated_part_is_a_clear_error(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [make_record()])
    write_manifest(tmp_path, {})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=part_name(0)):
        read_states(tmp_path)


def test_missing_split_says_which_there_are(tmp_path: Path) -> None:
    write_part(tmp_path, 0, [make_record()])
    write_manifest(tmp_path, {})
    with pytest.raises(DataError, match="there are: train"):
        read_states(tmp_path, "test")


def test_shared_evidence_between_train_and_test_is_an_error() -> None:
    check_split([make_record("a", "train"), make_record("b", "test", evidence=("t0",))])
    with pytest.raises(DataError, match="split by evidence cluster"):
        check_split([make_record("a", "train"), make_record("b", "test", evidence=("t0", "t3"))])
