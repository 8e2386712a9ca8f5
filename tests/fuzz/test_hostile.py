"""Input that means harm: each kind ends in one typed line, or is read rightly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fuzzing import seeds

from remind import read
from remind.data.readers.builder import Place
from remind.data.readers.locomo import EvidenceIndex
from remind.evaluation.parse import parse_answer


def test_ids_that_look_alike_stay_apart(tmp_path):
    names = ["é", "e\u0301", "E\u0301", "é ", "ﬁ", "fi", "A", "Α", "1", "01"]
    path = tmp_path / "x.jsonl"
    contexts = [{**seeds.REFMEM[0], "id": name} for name in names]
    questions = [{**seeds.REFMEM[1], "id": name, "context_id": name, "question": ascii(name)} for name in names]
    path.write_bytes(seeds.as_lines([*contexts, *questions]))
    corpus = read(path)
    assert [(d.id, [q.text for q in group]) for d, group in corpus.by_dialogue()] == [(n, [ascii(n)]) for n in names]


def test_evidence_in_linear_time():
    index = EvidenceIndex([f"D1:{number}" for number in range(1, 2000)])
    start = time.process_time()
    place = Place(Path("x.json"))
    assert index.resolve(place, "D" + " " * 200_000 + "x").references == 1
    evidence = index.resolve(place, "D1:1-1999 " * 200)
    assert time.process_time() - start < 5
    assert set(evidence.turn_ids) == {f"D1:{number}" for number in range(1, 2000)}


@pytest.mark.parametrize("text", ["<", "<answer></answer>", "A,", "<" + " " * 500 + "/"])
def test_a_megabyte_is_parsed_in_a_moment(text):
    start = time.process_time()
    parse_answer(text * (1_000_000 // len(text)), "multi", ["a", "b"])
    assert time.process_time() - start < 3
