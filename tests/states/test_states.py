"""States on disk: round trip, versions, damage, overlap of splits."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remind.core.errors import DataError, FormatError
from remind.core.files import sha256_file
from remind.data.dialogue import VISUAL_DIMENSIONS, Dialogue, Image, Question, Session, Turn
from remind.pipeline import Tally, record_of
from remind.pipeline.assemble import summary_of
from remind.pipeline.outline import Outline
from remind.states import parquet
from remind.states.parquet import (
    Picture,
    StateRecord,
    check_split,
    part_name,
    read_manifest,
    read_part,
    read_states,
    write_manifest,
    write_part,
)
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import FACTUAL, evidence_share


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


def test_a_part_can_be_read_without_the_levels_nobody_asks_for(tmp_path: Path) -> None:
    path, record = write_part(tmp_path, 0, [make_record()]), make_record()
    (texts,), (bare,) = read_part(path, ("x1",), spans=False), read_part(path, ())
    assert (texts.x1.text, texts.x1.turns, texts.x0.text) == (record.x1.text, (), "")
    assert bare == dataclasses.replace(texts, x1=bare.x1)
    assert (bare.x1.text, bare.question, bare.salience) == ("", record.question, record.salience)


def test_inferred_kinds_are_kept_and_counted(tmp_path: Path) -> None:
    """As many as written down here, and of each as many as are the question's own dimension."""
    own = ("pattern_induction", None, None, None, "temporal_dynamics")
    taken = ("pattern_induction", FACTUAL, "pattern_induction", None, FACTUAL)
    pairs = enumerate(zip(own, taken, strict=True))
    records = [dataclasses.replace(make_record(str(n), dimension=name), kind=kind) for n, (name, kind) in pairs]
    write_part(tmp_path, 0, records)
    write_manifest(tmp_path, {})
    assert [record.kind for record in read_states(tmp_path)] == list(taken)
    tally = Tally()
    for record in records:
        tally.add(record)
    assert tally.kinds == {"pattern_induction": 2, FACTUAL: 2}
    assert tally.kinds_as_gold == {"pattern_induction": 1, FACTUAL: 1}
    said = "kinds inferred: 2 pattern induction, 2 factual; 2 are those of the benchmark"
    assert said in summary_of(tally, Outline())
    assert "inferred" not in summary_of(Tally(), Outline())


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
    tally.add(dataclasses.replace(record, x1=record.x0))
    merged = Tally()
    for _ in range(2):
        merged.merge(tally.dump())
    assert (merged.questions, merged.without_marks) == (6, 2)
    assert "2 questions have no marked turn" in summary_of(merged, Outline())


def test_unfinished_foreign_newer_or_damaged_folders_are_refused(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [make_record()])
    with pytest.raises(FormatError, match="did not finish"):
        read_states(tmp_path)
    with pytest.raises(FormatError, match="not a states folder"):
        read_states("x" * 5000)
    write_manifest(tmp_path, {})
    below = tmp_path / "above" / "states"
    below.mkdir(parents=True)
    write_manifest(below, {})
    with pytest.raises(FormatError, match="there is one in states/"):
        read_states(below.parent)
    with pytest.raises(DataError, match="there are: train"):
        read_states(tmp_path, "test")
    manifest = tmp_path / "manifest.json"
    newer = {**json.loads(manifest.read_text()), "format_version": 4}
    for text, message in ((json.dumps(newer), "build them again"), ("{]", "not JSON"), ("{}", "not the manifest")):
        manifest.write_text(text)
        with pytest.raises(DataError, match=message):
            read_states(tmp_path)
    write_manifest(tmp_path, {})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=part_name(0)):
        read_states(tmp_path)


def test_rows_are_the_same_whole_and_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make_record(str(number)) for number in range(7)]
    part = write_part(tmp_path, 0, records)
    table = pq.read_table(part)
    pq.write_table(table, part, row_group_size=3, use_dictionary=False)
    monkeypatch.setattr(parquet, "MAX_BYTES", 2 * table.nbytes)
    assert read_part(part) == records


@pytest.mark.parametrize(
    ("limit", "most", "problem"),
    [
        ("MAX_QUESTIONS", 60, "has 64 questions; a part has at most 60"),
        ("MAX_TEXT", 5000, r"\[q0\]: x1 has 100,000 characters; a state has at most 5,000"),
        ("MAX_BYTES", 2**19, r" [5-9]\d\d,\d{3} bytes or more; a part has at most 524,288"),
        ("MAX_BYTES", 2**14, r" 1\d\d,\d{3} bytes or more; a part has at most 16,384"),
    ],
)
def test_small_files_that_unpack_to_large_ones(
    limit: str, most: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither written nor read on: the figure in the message is what was unpacked of 8 MB."""
    record = make_record()
    text = record.x1.text.ljust(100_000)
    record = dataclasses.replace(record, x1=dataclasses.replace(record.x1, text=text), x2=record.x1)
    records = [dataclasses.replace(record, question_id=f"q{number}") for number in range(64)]
    part = write_part(tmp_path, 0, records)
    assert part.stat().st_size < 2**17
    assert read_part(part) == records
    monkeypatch.setattr(parquet, limit, most)
    with pytest.raises(DataError, match=problem):
        read_part(part)
    with pytest.raises(DataError, match=problem.rpartition("; ")[2]):
        write_part(tmp_path, 1, records)
    assert [path.name for path in tmp_path.iterdir()] == [part.name]


def test_shared_evidence_between_train_and_test_is_an_error() -> None:
    check_split([make_record("a", "train"), make_record("b", "test", evidence=("t0",))])
    with pytest.raises(DataError, match="split by evidence cluster"):
        check_split([make_record("a", "train"), make_record("b", "test", evidence=("t0", "t3"))])


def level(**changes: object) -> StateRecord:
    """A record whose x1 is changed."""
    record = make_record()
    return dataclasses.replace(record, x1=dataclasses.replace(record.x1, **changes))  # type: ignore[arg-type]


def first_turn(**changes: object) -> StateRecord:
    turns = make_record().x1.turns
    return level(turns=(dataclasses.replace(turns[0], **changes), *turns[1:]))  # type: ignore[arg-type]


def asked(**changes: object) -> StateRecord:
    record = make_record()
    choice = {"format": "multi", "options": ("a", "b"), "answers": ("B",), **changes}
    return dataclasses.replace(record, **choice)  # type: ignore[arg-type]


def changed(**changes: object) -> StateRecord:
    return dataclasses.replace(make_record(), **changes)  # type: ignore[arg-type]


X1 = make_record().x1
END, TURN = len(X1.text), X1.turns[0]
AGAIN = dataclasses.replace(X1.turns[2], turn_id=X1.turns[1].turn_id)
OUTSIDE = "x1: speaker, text or captions of turn 't0' lie outside"
UNSOUND = [
    (level(dialogue=(0, END + 1)), "x1: the span of the dialogue"),
    (level(reasoning=((9, 3),)), "x1: a span of reasoning"),
    (level(anchors=((-1, 3),)), "x1: a span of anchors"),
    (level(markers=((0, 2), (3, 4))), "x1: markers overlap"),
    (level(markers=X1.markers[:1]), "x1: a block of markers is not closed"),
    (level(markers=((TURN.start, TURN.end), X1.markers[1])), "x1: markers overlap"),
    (level(markers=X1.markers[::-1]), "x1: markers overlap"),
    (level(turns=X1.turns[::-1]), "x1: turns overlap"),
    (level(turns=(TURN, TURN, *X1.turns[1:])), "x1: turns overlap"),
    (level(turns=(*X1.turns[:2], AGAIN)), "x1: a turn occurs twice"),
    (first_turn(speaker=(0, 1)), OUTSIDE),
    (first_turn(text=(TURN.start, END)), OUTSIDE),
    (first_turn(captions=((END - 1, END),)), OUTSIDE),
    (first_turn(turn_id=None), "x1: a text or a span is missing"),
    (first_turn(text=(1, 2, 3)), "x1: a text or a span is missing or incomplete"),
    (level(text=X1.text.replace("line 2", "line 3")), "x1: its dialogue without markers differs"),
    (changed(salience=(0.5,)), "salience"),
    (changed(question=None), "question is missing"),
    (changed(split="valid"), "unknown split 'valid'"),
    (changed(format="open"), "unknown format 'open'"),
    (changed(options=(None,)), "an entry of options is missing"),
    (changed(options=("a",)), "a direct question has no options"),
    (asked(options=()), "a multi question needs 1 to 26 options, this one has 0"),
    (asked(answers=("Z",)), "gold answer 'Z' names none of its options"),
    (asked(answers=("B", "B")), "an answer occurs twice"),
    (asked(format="single", answers=("A", "B")), "a single question has one answer, not 2"),
    (changed(dimension="depth"), "unknown dimension 'depth'"),
    (changed(visual=True), "visual does not match the dimension"),
    (changed(images=(0, -5)), "an image index is -5"),
    (changed(evidence_lines=("Ana: hi",)), "evidence_lines has 1 lines for 2 turns"),
    (changed(evidence_found=("t2",)), "evidence_found or images_found names something that is not gold evidence"),
    *(
        (changed(pictures=(Picture(turn, place, "x.png"),)), "a picture belongs to no image in x0")
        for turn, place in (("t3", 0), ("t1", 1), ("t1", -1))
    ),
]


@pytest.mark.parametrize(("record", "message"), UNSOUND)
def test_what_no_state_can_say_is_refused(tmp_path: Path, record: StateRecord, message: str) -> None:
    path = write_part(tmp_path, 0, [make_record("a"), record])
    with pytest.raises(DataError, match=r"build the states again") as caught:
        read_part(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path} [q]: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": ("A", "B")},
        {"format": "single", "answers": ()},
        {"format": "single", "options": ("x",) * 26, "answers": ("Z",)},
        {"format": "direct", "options": (), "answers": ("so", "so")},
        {"dimension": VISUAL_DIMENSIONS[0], "visual": True},
        {"evidence_lines": ()},
        {"pictures": (Picture("t1", 0, "x.png"),)},
    ],
)
def test_what_states_can_say_is_read(tmp_path: Path, changes: dict[str, object]) -> None:
    record = asked(**changes)
    assert read_part(write_part(tmp_path, 0, [make_record("a"), record])) == [make_record("a"), record]


@pytest.mark.parametrize("question_id", ["", " ", "\x1b\u202e" + "x" * 1_000_000])
def test_ids_that_cannot_be_shown_are_told_shortly(tmp_path: Path, question_id: str) -> None:
    record = dataclasses.replace(make_record(), question_id=question_id, split="x" if question_id.strip() else "dev")
    path = write_part(tmp_path, 0, [make_record("a"), record])
    with pytest.raises(DataError) as caught:
        read_part(path)
    assert len(str(caught.value)) < len(str(path)) + 300
    assert str(caught.value).isprintable()
    write_part(tmp_path, 0, [dataclasses.replace(record, split="dev", question_id=question_id + "y")] * 2)
    write_manifest(tmp_path, {})
    with pytest.raises(DataError, match="occurs twice") as caught:
        read_states(tmp_path)
    assert len(str(caught.value)) < len(str(path)) + 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"parts": []}, "parts should be an object, not a list"),
        ({"parts": {part_name(0): 5}}, "should be text, not a number"),
        ({"inputs": [1]}, "inputs should be an object, not a list"),
        ({"inputs": {"a.json": None}}, "inputs: 'a.json' should be text"),
        ({"config": []}, "config should be an object, not a list"),
        ({"config": {"backbone": 5}}, r"config\.backbone should be text, not a number"),
        ({"config": {"input": ["a", 5]}}, r"config\.input should be text"),
        ({"config": {"grounding": [1]}}, r"config\.grounding should be an object, not a list"),
    ],
)
def test_a_manifest_of_other_kinds_is_refused(tmp_path: Path, manifest: dict[str, object], message: str) -> None:
    write_part(tmp_path, 0, [make_record()])
    write_manifest(tmp_path, manifest)
    with pytest.raises(DataError, match=rf"manifest\.json: {message}" if message[0] != "s" else message):
        read_states(tmp_path)


def test_a_flipped_bit_is_never_taken_for_another_record(tmp_path: Path) -> None:
    record = make_record()
    path = write_part(tmp_path, 0, [record])
    good = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for at in rng.sample(range(len(good)), 120):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        try:
            assert read_part(path) == [record]
        except DataError:
            refused += 1
    assert refused > 20


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [make_record()])
    table = pq.read_table(path)
    for name, kind in (("question", pa.large_string()), ("visual", pa.int8()), ("salience", pa.list_(pa.float64()))):
        place = table.column_names.index(name)
        pq.write_table(table.set_column(place, name, table[name].cast(kind)), path)
        with pytest.raises(FormatError, match=f"its column {name} has the wrong type"):
            read_part(path)
    pq.write_table(table.drop_columns(["x1"]), path)
    with pytest.raises(FormatError, match="columns are not those"):
        read_part(path)


def test_a_part_changed_missing_foreign_or_twice(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [make_record()])
    write_manifest(tmp_path, {"parts": {path.name: sha256_file(path)}})
    assert read_states(tmp_path) == [make_record()]
    write_part(tmp_path, 0, [make_record(text="who?")])
    with pytest.raises(DataError, match=r"part-00000\.parquet: has changed since it was built"):
        read_states(tmp_path)
    write_part(tmp_path, 0, [make_record()])
    write_part(tmp_path, 1, [make_record()])
    write_manifest(tmp_path, {})
    with pytest.raises(DataError, match="the question occurs twice"):
        read_states(tmp_path)
    write_manifest(tmp_path, {"parts": {part_name(0): ""}})
    with pytest.raises(FormatError, match=r"'part-00001\.parquet' does not belong to this build"):
        read_states(tmp_path)
    write_manifest(tmp_path, {"parts": dict.fromkeys(map(part_name, range(3)), "")})
    with pytest.raises(FormatError, match=r"'part-00002\.parquet' is missing"):
        read_states(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", part_name(0)])
def test_only_regular_files_are_opened(name: str, tmp_path: Path, pipe: Callable[[Path], None]) -> None:
    write_part(tmp_path, 0, [make_record()])
    write_manifest(tmp_path, {})
    pipe(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: is not a regular file"):
        read_states(tmp_path)
