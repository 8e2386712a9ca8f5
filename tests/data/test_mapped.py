"""JSON of other shapes, read by a mapping: known corpora are written in them and must come out as they were."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import seeds
from fuzzing.seeds import changed

from remind import Corpus, read
from remind.core.errors import ConfigError, DataError, FormatError
from remind.data.readers import stream
from remind.data.sample import sample_path


def write(folder: Path, mapping: dict[str, Any], **files: Any) -> tuple[Path, str]:
    """The files (JSON Lines where the name says so) and the mapping; what `read` takes."""
    (folder / "data").mkdir(exist_ok=True)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        rows = [json.dumps(row, ensure_ascii=False) for row in (content if suffix == "jsonl" else [content])]
        (folder / "data" / f"{stem}.{suffix}").write_text("\n".join(rows), encoding="utf-8")
    path = folder / "mapping.yaml"
    path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
    return folder / "data", str(path)


@pytest.mark.parametrize(("nested", "answers"), [(True, "letter"), (False, "index"), (True, "text")])
def test_the_bundled_sample_in_other_shapes(tmp_path: Path, nested: bool, answers: str) -> None:
    """Other names and values; questions in their dialogues, or in files of their own; sessions by name."""
    corpus = read(sample_path() / "dev.jsonl")
    dialogues, asked = [], []
    for dialogue, questions in corpus.by_dialogue():
        rows = []
        for q in questions:
            places = ["ABCDEF".index(letter) for letter in q.answers] if q.options else []
            told = {"letter": q.answers, "index": [n + 1 for n in places], "text": [q.options[n] for n in places]}
            row = {
                "qid": q.id,
                "meta": {"ask": q.text, "kind": f"<{q.format}>", "dim": str(q.dimension).title()},
                "choices": [{"says": option} for option in q.options],
                "gold": told[answers] if q.options else q.answers,
                "why": q.evidence,
                "shown": [index + 1 for index in q.images],
                "part": q.split,
                "about": dialogue.id,
            }
            rows.append(row)
        asked += rows
        parts = {
            s.id: {
                "when": s.time,
                "log": [
                    {"who": t.speaker, "said": t.text, "uid": t.id, "pics": [[i.caption] for i in t.images]}
                    for t in s.turns
                ],
            }
            for s in dialogue.sessions
        }
        dialogues.append({"name": dialogue.id, "parts": parts, **({"qa": rows} if nested else {})})
    mapping: dict[str, Any] = {
        "count_from": 1,
        "dialogue": {"id": "name", "sessions": "parts"},
        "session": {"time": "when", "turns": "log"},
        "turn": {"id": "uid", "speaker": "who", "text": "said", "images": "pics?"},
        "image": {"caption": "0"},
        "question": {
            "id": "qid",
            "text": "meta.ask",
            "format": "meta.kind",
            "dimension": "meta.dim",
            "split": "part",
            "options": "choices",
            "answers": "gold",
            "evidence": "why",
            "images": "shown",
        },
        "option": {"text": "says"},
        "answer": {answers: "."},
        "values": {
            "format": {f"<{name}>": name for name in ("single", "multi", "direct")},
            "dimension": {str(q.dimension).title(): q.dimension for q in corpus.questions},
        },
    }
    if nested:
        mapping["dialogue"] |= {"records": "all.those", "questions": "qa"}
        folder, format = write(tmp_path, mapping, one_json={"all": {"those": dialogues}})
    else:
        mapping["dialogue"]["file"], mapping["question"]["file"] = "talk*", "ask?.jsonl"
        mapping["question"]["dialogue"] = "about"
        folder, format = write(tmp_path, mapping, talk_json=dialogues, ask1_jsonl=asked)
    assert read(folder, format) == corpus
    pieces = list(stream(folder, format))
    assert (Corpus.merge(pieces), len(pieces)) == (corpus, len(corpus.dialogues))


@pytest.mark.parametrize(
    ("evidence", "pieces", "found", "dangling"),
    [
        ({"session": "of", "turn": "at"}, [{"of": "b", "at": 2}, {"of": "b", "at": 9}], ("b:T2",), ("b:9",)),
        ({"line": "."}, [" Ben:  What\nnow?", "What now?", "hi"], ("b:T2",), ("hi",)),
        ({"id": "."}, ["b:T2", "a:T7"], ("b:T2",), ("a:T7",)),
    ],
)
def test_evidence_by_session_and_turn_or_by_line(
    tmp_path: Path, evidence: dict[str, str], pieces: list[Any], found: tuple[str, ...], dangling: tuple[str, ...]
) -> None:
    """What several turns say names none of them."""
    log = {"a": [["Ana", "hi"]], "b": [["Ana", "hi"], ["Ben", "What now?"]]}
    mapping = {
        "count_from": 1,
        "dialogue": {"sessions": "log", "questions": "qa"},
        "turn": {"speaker": "0", "text": "1"},
        "question": {"text": "q", "evidence": "why"},
        "evidence": evidence,
    }
    folder, format = write(tmp_path, mapping, x_json={"log": log, "qa": [{"q": "?", "why": pieces}]})
    corpus = read(folder, format)
    assert corpus.questions[0].evidence == found
    assert tuple(lost.reference for lost in corpus.dangling) == dangling
    assert corpus.references == len(pieces)


def test_what_is_not_mapped_is_counted_or_inferred(tmp_path: Path) -> None:
    """A question with its haystack in each record, turns without names, answers in several notations."""
    records = [
        {"hay": [["hi", "ho"], ["ha"]], "ask": "Which?", "of": {"a": "red", "b": 2}, "gold": "(b)"},
        {"hay": [["hi"]], "ask": "All?", "of": {"x": "red", "y": "blue", "z": "grey"}, "gold": "[x, z]"},
        {"hay": [["hi"]], "ask": "Why?", "of": None, "gold": ["so", 1.5]},
        {"hay": [["hi"]], "ask": "None?", "of": ["one", "two"], "gold": None},
    ]
    for record in records:
        record["hay"] = [[{"s": "Ana", "t": text} for text in session] for session in record["hay"]]
    mapping = {
        "dialogue": {"sessions": "hay", "questions": "."},
        "turn": {"speaker": "s", "text": "t"},
        "question": {"text": "ask", "options": "of", "answers": "gold"},
    }
    folder, format = write(tmp_path, mapping, x_jsonl=records)
    corpus = read(folder, format)
    assert [d.id for d in corpus.dialogues] == ["x-00001", "x-00002", "x-00003", "x-00004"]
    assert [(s.id, [t.id for t in s.turns]) for s in corpus.dialogues[0].sessions] == [
        ("S1", ["S1:T1", "S1:T2"]),
        ("S2", ["S2:T1"]),
    ]
    assert [(q.id, q.format, q.options, q.answers) for q in corpus.questions] == [
        ("x-00001-q000", "single", ("red", "2"), ("B",)),
        ("x-00002-q000", "multi", ("red", "blue", "grey"), ("A", "C")),
        ("x-00003-q000", "direct", (), ("so", "1.5")),
        ("x-00004-q000", "single", ("one", "two"), ()),
    ]


DATA = seeds.SHAPED
# BaseLoader makes text, lists and dictionaries alone: `no` is a key here, and nothing can be constructed
MAPPING = yaml.load(seeds.MAPPING, yaml.BaseLoader)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("turn.txt", "x", "unknown key 'turn.txt'; did you mean turn.text?"),
        ("zzz", 1, "unknown key 'zzz'; sections: dialogue, session, turn,"),
        ("values.split", "train", "values.split should map values of the data to train, dev, test"),
        ("values.split.y", "training", "values.split should be train or dev or test, not 'training'"),
        ("count_from", 2, "count_from should be 0 or 1, not '2'"),
        ("turn.text", ["a"], "turn.text: ['a'] is not a path"),
        ("turn.text", "a..b", "turn.text: 'a..b' is not a path"),
        ("turn.text", ..., "turn.text is missing"),
        ("dialogue.turns", "x", "dialogue needs either sessions or turns"),
        ("question.dialogue", "x", "either dialogue.questions or question.dialogue says which dialogue a question is"),
        ("evidence.line", ".", "evidence must be given by id, by session and turn, or by line"),
        ("answer.letter", ".", "answer must be given by letter or by index"),
    ],
)
def test_a_mapping_that_is_none(tmp_path: Path, path: str, value: Any, message: str) -> None:
    folder, format = write(tmp_path, changed(MAPPING, path, value), x_json=DATA)
    with pytest.raises(ConfigError) as caught:
        read(folder, format)
    assert message in str(caught.value)
    assert str(caught.value).startswith(format)


def test_questions_apart_need_their_dialogue(tmp_path: Path) -> None:
    mapping = changed(changed(MAPPING, "dialogue.questions", ...), "question.dialogue", "of")
    for wrong, message in ((mapping, "both need file, or both records"), ([1], "unknown key")):
        with pytest.raises(ConfigError, match=message):
            read(*write(tmp_path, wrong, x_json=DATA))
    mapping = {
        "dialogue": {"file": "a.json", "id": "c", "turns": "t"},
        "turn": {"speaker": "s", "text": "x"},
        "question": {"file": "b.json", "dialogue": "c", "text": "q", "id": "i?"},
    }
    talk = {"c": "one", "t": [{"s": "Ana", "x": "hi"}]}
    folder, format = write(tmp_path, mapping, a_json=talk, b_json=[{"c": "one", "q": "?"}, {"c": "two", "q": "??"}])
    with pytest.raises(DataError, match=r"b\.json \[item 2\]: its dialogue 'two' is missing"):
        read(folder, format)
    write(tmp_path, mapping, b_json=[{"c": "one", "q": "?", "i": 1}, {"c": "one", "q": "??", "i": "1"}])
    with pytest.raises(DataError, match=r"b\.json \[item 2\, 1]: question id '1' occurs twice"):
        read(folder, format)
    with pytest.raises(FormatError, match=r"unknown format 'mapping'.*or a mapping file"):
        read(folder, "mapping")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read(folder, str(tmp_path / "none.yaml"))


def test_an_optional_path_that_is_never_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, format = write(tmp_path, changed(MAPPING, "turn.time", "when?"), x_json=DATA)
    with caplog.at_level(logging.WARNING):
        assert len(read(folder / "x.json", format).questions) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{format}: no record has 'when', where turn.time should be"
    ]


def test_dialogues_are_joined_with_their_questions(tmp_path: Path) -> None:
    def episode(name: str, season: str) -> dict[str, Any]:
        return {**changed(DATA, "data.0.conv", name)["data"][0], "season": season}

    mapping = changed(MAPPING, "dialogue.join", "season")
    episodes = [episode("e1", "s1"), episode("e2", "s1"), episode("e3", "s2")]
    folder, format = write(tmp_path, mapping, x_json={"data": episodes})
    corpus = read(folder, format)
    assert [d.id for d in corpus.dialogues] == ["s1", "s2"]
    first = corpus.dialogues[0]
    assert [s.id for s in first.sessions] == ["e1:1", "e1:2", "e2:1", "e2:2"]
    assert [i.index for i in first.images] == [0, 1]
    by_id = {question.id: question for question in corpus.questions}
    assert by_id["e2-q000"].evidence == ("e2:1:T1",)
    assert by_id["e2-q000"].images == (1,)
    assert by_id["e2-q000"].dialogue_id == "s1"
    assert by_id["e3-q000"].images == (0,)
    assert [(lost.question_id, lost.reference) for lost in corpus.dangling] == [
        (f"e{n}-q001", "9:9") for n in (1, 2, 3)
    ]
    assert corpus.references == 9
    write(tmp_path, mapping, x_json={"data": [*episodes, episode("e4", "s1")]})
    with pytest.raises(DataError, match=r"\[dialogue 4, s1\]: dialogue id 's1' occurs twice"):
        read(folder, format)
