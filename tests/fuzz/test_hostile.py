"""Input that means harm: each kind ends in one typed line, or is read rightly."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from fuzzing import seeds
from fuzzing.targets import make_targets, wrong

from remind import read
from remind.core.errors import DataError, ImagePathError
from remind.core.files import read_json
from remind.data.readers.builder import Place
from remind.data.readers.locomo import EvidenceIndex
from remind.evaluation.parse import parse_answer
from remind.evaluation.predictions import PREDICTIONS, appending
from remind.evaluation.stages import predictions


def turn(**changes):
    return json.dumps({"speaker": "Ana", "text": "hi", **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"speaker": "Ana", "text": "hi", "text": "ho"}', "the key 'text' occurs twice in one object"),
        (f"{turn()}\n" + '{"speaker": "A", "text": {"a": 1, "a": 2}}', "line 2]: not JSON: the key 'a' occurs twice"),
        (turn(speaker="\ud800"), "speaker holds half a character"),
        (turn(dialogue="a\nb\u202e" * 99, text=None), "the dialogue has no turns"),
        (turn(images=["a\0b"]), "is not a usable path"),
        (turn(images=["/etc/passwd"]), "is outside the data folder"),
        (turn(images=["file:///etc/passwd"]), "no such file"),
        (turn(session=[[]] * 9), "session should be text, not a list"),
        ('{"speaker": "Ana", "text": 1e400}', "text should be text, not a number"),
        ("[" + '{"a":' * 3000, "maximum recursion"),
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


@pytest.mark.parametrize(
    ("format", "path", "value", "message"),
    [
        ("locomo", (0, "qa", 0, "answer"), float("inf"), "answer should be text, not a number"),
        ("locomo", (0, "qa", 0, "evidence"), [{"a": 1}], "evidence should be text, not an object"),
        ("locomo", (0, "qa", 0, "category"), [[[[]]]], "category should be a whole number, not "),
        ("longmemeval", (0, "haystack_session_ids", 0), [[]], "an entry of haystack_session_ids should be text"),
        ("longmemeval", (0, "haystack_sessions", 0, 0, "has_answer"), "false", "has_answer should be true or false"),
        ("refmem", (1, "format"), [[[]]], "unknown question format [["),
    ],
)
def test_values_of_the_wrong_kind(tmp_path, format, path, value, message):
    content = json.loads(json.dumps(getattr(seeds, format.upper())))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "x.json"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        read(file, format)
    assert message in str(caught.value)


@pytest.mark.parametrize("speaker", ["[{[]: 1}]", "[" * 5000, "['\\ud800']"])
def test_speakers_that_are_no_list_of_names(tmp_path, speaker):
    header, row = "Utterance,Speaker,Scene_ID,Utterance_ID,Season,Episode\n", f'hi,"{speaker}",1,1,1,1\n'
    (tmp_path / "x.csv").write_text(header + row)
    with pytest.raises(DataError, match=r"not a list of names|half a character"):
        read(tmp_path / "x.csv")


def test_ids_that_look_alike_stay_apart(tmp_path):
    names = ["é", "e\u0301", "E\u0301", "é ", "ﬁ", "fi", "A", "Α", "1", "01"]
    path = tmp_path / "x.jsonl"
    contexts = [{**seeds.REFMEM[0], "id": name} for name in names]
    questions = [{**seeds.REFMEM[1], "id": name, "context_id": name, "question": ascii(name)} for name in names]
    path.write_bytes(seeds.as_lines([*contexts, *questions]))
    corpus = read(path)
    assert [(d.id, [q.text for q in group]) for d, group in corpus.by_dialogue()] == [(n, [ascii(n)]) for n in names]


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "pipe.json", "/dev/zero", "/dev/null", tmp_path / "loop.jsonl", "a\0b", "x" * 5000):
        with pytest.raises(DataError):
            read(path)
        with pytest.raises(DataError):
            read_json(path)
    for name in ("loop.jsonl", "pipe.json"):
        with pytest.raises(DataError, match=rf"{name}: (no such file|is not a regular file)"):
            read(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "x.jsonl").write_text(turn())
    assert len(read(tmp_path).dialogues) == 1


def test_a_linked_file_is_read_and_its_images_stay_by_the_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "far" / "a.png").write_bytes(b"x")
    (tmp_path / "far" / "x.jsonl").write_text(turn(images=["a.png"]))
    (tmp_path / "near" / "x.jsonl").symlink_to(tmp_path / "far" / "x.jsonl")
    with pytest.raises(ImagePathError, match="no such file"):
        read(tmp_path / "near")
    (tmp_path / "near" / "a.png").symlink_to(tmp_path / "far" / "a.png")
    with pytest.raises(ImagePathError, match="is outside the data folder"):
        read(tmp_path / "near")
    # photos that link to themselves
    (tmp_path / "a.jpg").symlink_to("a.jpg")
    (tmp_path / "x.json").write_bytes(seeds.as_list(seeds.REALTALK))
    assert read(tmp_path / "x.json").dialogues[0].images[0].path is None


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


NOT_OUTPUTS = [{"text": "\ud800"}, {"prompt": 5}, {"new_tokens": None}]
ROW = json.dumps(seeds.PREDICTION)


def test_outputs_that_are_none(tmp_path):
    path = tmp_path / PREDICTIONS
    for change in NOT_OUTPUTS:
        path.write_text(json.dumps({**seeds.PREDICTION, **change}) + "\n")
        with pytest.raises(DataError, match=r"line 1\]: not an output"):
            list(predictions(path))


def test_a_cut_last_line_mends_no_other(tmp_path):
    path, row = tmp_path / PREDICTIONS, ROW.encode()
    damaged = row.replace(b"<answer>A", b"<answer>A\xff") + b"\n"
    path.write_bytes(damaged + row[:20])
    for _ in range(2):
        with pytest.raises(DataError, match=r"line 1\]: not an output"):
            list(predictions(path))
        assert path.read_bytes() == damaged + row[:20]
    path.write_bytes(row + b"\n" + row[:20])
    assert [one.question_id for one in predictions(path)] == ["q1"]
    with appending(path):
        pass
    assert path.read_bytes() == row + b"\n"


def test_files_cut_off_anywhere(tmp_path):
    targets = make_targets()
    for name, files in seeds.FILES.items():
        for end in range(0, len(files[0]), 13):
            assert wrong(targets[name], files[0][:end], tmp_path) is None
