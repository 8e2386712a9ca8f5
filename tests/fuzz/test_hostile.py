"""Input that means harm: each kind ends in one typed line, or is read rightly."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fuzzing import seeds

from remind import read
from remind.core.errors import DataError
from remind.data.readers.builder import Place
from remind.data.readers.locomo import EvidenceIndex
from remind.evaluation.parse import parse_answer


def turn(**changes):
    return json.dumps({"speaker": "Ana", "text": "hi", **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{turn()}\n" + '{"speaker": "A", "text": {"a": 1, "a": 2}}', "line 2]: not JSON: the key 'a' occurs twice"),
        (turn(speaker="\ud800"), "speaker holds half a character"),
        (turn(images=["a\0b"]), "is not a usable path"),
        (turn(images=["/etc/passwd"]), "is outside the data folder"),
        ('{"speaker": "Ana", "text": 1e400}', "text should be text, not a number"),
        ("[1" + "1" * 5000, "Exceeds the limit"),
    ],
)
def test_hostile_records(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read(path, "chat") if "speaker" in content else read(path)
    error = str(caught.value)
    assert message in error
    assert "\n" not in error
    assert len(error) < 500
    assert error.isprintable()


def test_ids_that_look_alike_stay_apart(tmp_path):
    names = ["é", "e\u0301", "E\u0301", "é ", "ﬁ", "fi", "A", "Α", "1", "01"]
    path = tmp_path / "x.jsonl"
    contexts = [{**seeds.REFMEM[0], "id": name} for name in names]
    questions = [{**seeds.REFMEM[1], "id": name, "context_id": name, "question": ascii(name)} for name in names]
    path.write_bytes(seeds.as_lines([*contexts, *questions]))
    corpus = read(path)
    assert [(d.id, [q.text for q in group]) for d, group in corpus.by_dialogue()] == [(n, [ascii(n)]) for n in names]


@pytest.mark.parametrize("text", ["Α", "Ａ", "a\u0301", "C"])
def test_letters_that_only_look_like_options(text):
    assert not parse_answer(f"<answer>{text}</answer>", "multi", ["x", "y"]).letters


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
