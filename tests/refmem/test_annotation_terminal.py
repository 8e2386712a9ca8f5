"""The terminal twin: answers typed in become rows; it resumes, goes back, and text can do nothing to the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from annotation_samples import HOSTILE, corpus, dialogue, item, row

from remind.core.errors import DataError
from remind.data.readers import write_refmem
from remind.refmem.annotation import read_annotations, write_annotations
from remind.refmem.annotation.context import windows
from remind.refmem.annotation.shown import candidates_for, order_for
from remind.refmem.annotation.terminal import annotate, plain
from remind.refmem.items import write_items

ITEMS = [item("one"), item("two", "multi", evidence=("T0", "T1", "T2", "T3"), images=(1,)), item("three", "direct")]
ORDER = [one.id for one in order_for(ITEMS, "Ana", 0)]


class Typist:
    """Types the lines it was given for each item; the end of them is the end of the input."""

    def __init__(self, **lines: list[str]) -> None:
        self.lines = [line for name in ORDER for line in lines.get(name, [])]
        self.shown: list[str] = []

    def ask(self, prompt: str) -> str:
        self.shown.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def sit(self, path: Path) -> list:
        return annotate(ITEMS, corpus(), "Ana", path, ask=self.ask, show=self.shown.append)

    @property
    def told(self) -> str:
        return "\n".join(self.shown)


def test_what_is_typed_becomes_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    loud = "ABC"[candidates_for(ITEMS[2], "Ana", 0).index("a loud life")]
    typist = Typist(
        one=["B C", "z", "c", "+T21 -T95", "9", "4", "sure of it"],
        two=["ca", "", "5", ""],
        three=[f"{loud}; =her own way", "none", "1", ""],
    )
    rows = {one.item_id: one for one in typist.sit(path)}
    assert typist.lines == []
    one, two, three = rows["one"], rows["two"], rows["three"]
    assert (one.answers, one.evidence, one.confidence, one.note) == (("C",), ("T20", "T21"), 4, "sure of it")
    assert (two.answers, two.evidence, two.images, two.confidence) == (("A", "C"), ("T0", "T1", "T2", "T3"), (1,), 5)
    assert (three.answers, three.evidence, three.confidence) == (("a loud life", "her own way"), (), 1)
    assert {one.item_id: one for one in read_annotations(path, ITEMS)} == rows
    for word in ("choose one option", "'Z' is none of A, B, C, D", "from 1 to 5"):
        assert word in typist.told


def test_nothing_of_the_generated_answer_is_told(tmp_path: Path) -> None:
    told = []
    for answers in ("A", "B"):
        typist = Typist(one=[":s"], two=[":s"], three=[":s"])
        changed = [item(i.id, i.format, evidence=i.evidence, answers=tuple(answers)) for i in ITEMS]
        annotate(changed, corpus(), "Ana", tmp_path / "a.jsonl", ask=typist.ask, show=typist.shown.append)
        told.append(typist.told)
    assert told[0] == told[1]
    assert "secret" not in told[0]


def test_a_killed_sitting_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answered = ["a", "", "3", ""]
    first, second, third = ORDER
    # the input ends in the middle of the second item
    assert len(Typist(**{first: answered, second: ["a", ""]}).sit(path)) == 1
    before = read_annotations(path, ITEMS)
    assert len(Typist(**{second: [":q"]}).sit(path)) == 1
    rows = Typist(**{second: [":s"], third: answered}).sit(path)
    assert [one.item_id for one in rows] == [first, third]
    assert rows[0] == before[0]


def test_flags_going_back_finding_and_help(tmp_path: Path) -> None:
    first, second, third = ORDER
    typist = Typist(
        **{
            first: ["a", "", "2", ""],
            second: [":b", "b", "", "5", "again", ":?", ":f SUBJECT 77", ":w", "a", ":r", "no ground"],
            third: [":q"],
        }
    )
    rows = typist.sit(tmp_path / "a.jsonl")
    wanted = {"three": candidates_for(ITEMS[2], "Ana", 0)[1]}.get(first, "B")
    assert (rows[0].answers, rows[0].confidence, rows[0].note) == ((wanted,), 5, "again")
    assert rows[1].remove
    assert (rows[1].confidence, rows[1].note) == (None, "no ground")
    assert "1 turns" in typist.told
    assert "Your answer so far" in typist.told
    assert "T119" in typist.told


def test_text_cannot_act_on_the_terminal() -> None:
    assert plain(HOSTILE[3]) == "<!-- --> ]]> {{ 7 * 7 }} ␦[2J␦"
    assert "\u202e" not in plain(HOSTILE[2])
    assert plain("a\r\nb\tc\x9b") == "a b c␦"


def test_windows_by_hand() -> None:
    given = item("w", evidence=("T1", "T6", "T42"))
    # sessions are turns 0-39, 40-79, 80-119; 1±2 cut at the start, joined with 6±2, 42±2 cut at its session
    assert windows(dialogue(), given, 2) == [(0, 8), (40, 44)]
    assert windows(dialogue(), given, 0) == [(1, 1), (6, 6), (42, 42)]
    assert windows(dialogue(), given, 0, [(0, 3), (4, 9), (50, 60)]) == [(0, 9), (42, 42)]
    # image 1 is shared in turn 15
    assert windows(dialogue(), item("w", evidence=(), images=(1,)), 1) == [(14, 16)]
    assert windows(dialogue(), item("w", evidence=()), 1) == [(0, 39)]
    with pytest.raises(DataError, match="T999"):
        windows(dialogue(), item("w", evidence=("T999",)), 1)


def test_another_annotators_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_annotations([row(ITEMS[0], "Ben", "A")], path)
    with pytest.raises(DataError, match="Ben's file"):
        Typist().sit(path)


@pytest.mark.slow
def test_the_script_reads_a_pipe(tmp_path: Path) -> None:
    write_items(tmp_path / "items.jsonl", [ITEMS[0]])
    write_refmem(corpus(), tmp_path / "dialogues.jsonl")
    script = Path(__file__).parents[2] / "scripts" / "annotate_refmem.py"
    command = [sys.executable, str(script), "--drafts", str(tmp_path / "items.jsonl"), "--input"]
    command += [
        str(tmp_path / "dialogues.jsonl"),
        "--out",
        str(tmp_path),
        "--mode",
        "terminal",
        "--annotators",
        "[Ana]",
    ]
    ran = subprocess.run(command, input="d\n\n4\n\n", capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    (found,) = read_annotations(tmp_path / "annotations_Ana.jsonl", ITEMS)
    assert (found.answers, found.evidence, found.confidence) == (("D",), ("T20", "T95"), 4)
    assert "annotations_Ana.jsonl" in ran.stdout
