"""DialSim and PerLTQA: small files made by hand after what their repositories document."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from fuzzing import seeds

from remind import read

OPTIONS = ["Rachel", "Monica", "Monica", "Carol", "I don't know."]
ASKED = {"questions": {"Joey": "Who left him?", "default": "Who left Ross?"}, "options": OPTIONS, "answer": "carol"}
SCRIPT = "Teleplay: Somebody\n\n[Scene: A cafe]\nMonica: Hi!\nAnd?\nRoss: Carol left.\n"


def test_a_show_of_dialsim(tmp_path: Path) -> None:
    late = ASKED | {"answer": "I don't know."}
    hard = {"past": [ASKED, ASKED | {"answer": "Phoebe"}], "past_fu": [late], "fu": []}
    scenes = {
        1: {"date": "September 22, 1994", "script": SCRIPT, "hard_q": hard},
        3: {"date": "that night", "script": "All: Bye.", "easy_q": {"ans_w_time": {9: ASKED, 12: late}}},
    }
    (tmp_path / "friends_oracle_tkg.pickle").write_bytes(b"\x80")
    (tmp_path / "friends_dialsim.pickle").write_bytes(pickle.dumps({"S01E01 The Pilot.txt": scenes, "S01E02": {}}))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert dialogue.id == "friends_dialsim"
    assert [(session.id, session.time) for session in dialogue.sessions] == [
        ("e001:S1", "1994-09-22"),
        ("e001:S3", "that night"),
    ]
    assert [(turn.id, turn.speaker, turn.text) for turn in dialogue.turns] == [
        ("e001:S1:T1", "[Scene", "A cafe]"),
        ("e001:S1:T2", "Monica", "Hi!\nAnd?"),
        ("e001:S1:T3", "Ross", "Carol left."),
        ("e001:S3:T1", "All", "Bye."),
    ]
    found = [(q.id, q.text, q.options, q.answers, q.category, q.time) for q in corpus.questions]
    options = ("Rachel", "Monica", "Carol", "I don't know.")
    assert found == [
        ("e001:S1-past-0", "Who left Ross?", options, ("C",), "past", "1994-09-22"),
        ("e001:S3-ans_w_time-9", "Who left Ross?", options, ("C",), "ans_w_time", "that night"),
        ("e001:S3-ans_w_time-12", "Who left Ross?", options, ("D",), "ans_w_time", "that night"),
    ]


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("content", ["bomb", "no show", "cut"])
def test_a_pickle_that_is_no_show_runs_nothing(tmp_path: Path, refused: Any, content: str) -> None:
    path, canary = tmp_path / "x_dialsim.pickle", tmp_path / "canary"
    held = {"bomb": pickle.dumps({"S01E01": Bomb(canary)}), "no show": pickle.dumps([1])}
    path.write_bytes(held.get(content) or pickle.dumps(seeds.DIALSIM)[:-9])
    message = {"bomb": "no pickle of plain values: it names pathlib", "no show": "a show should be an object"}
    assert message.get(content, "no pickle of plain values: ") in refused(path)
    assert not canary.exists()


def test_lives_of_perltqa(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    relation = {"Supporting Characters": "Wei", "Description": "They row together.", "Relationship": "friend"}
    event = {"content": "They won.", "summary": "A race", "Characters": ["1_0"], "Creation Time": "May 12, 2022"}
    contents = {"2022-05-12 10:00": ["Wei: Well rowed: thanks!", "Ming: Tea?"], "2022-05-12 11:00": ["Wei: Yes."]}
    memories = {
        "profile": {"Protagonist": "Ming", "Age": 28},
        "profile_description": "…",
        "social_relationship": repr({"1_0": relation}),  # as part of the published file has it
        "events": {"1_0_0": event},
        "dialogues": {"1_0_0#1": {"events": "1_0_0", "contents": contents}},
    }

    def asked(reference: str) -> dict[str, Any]:
        return {"Question": f"Of {reference}?", "Answer": "So.", "Reference Memory": reference, "Memory Anchors": []}

    questions = {
        "profile": [asked("Age")],
        "social_relationship": [{"1_0": [asked("['1_0']")]}],
        "events": [{"1_0_0": [asked("['1_0_0', '7_7_7']")]}],
        "dialogues": [{"1_0_0#1": [asked("['1_0_0#1']")]}],
    }
    (tmp_path / "perltmem_en_v2.json").write_text(json.dumps({"Ming": memories}, indent=1))
    (tmp_path / "perltqa_en_v2.json").write_text(json.dumps([{"Ming": questions}, {"Dragon": questions}]))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert [(turn.id, turn.speaker, turn.text, turn.time) for turn in dialogue.turns] == [
        ("Protagonist", "Ming", "Protagonist: Ming", None),
        ("Age", "Ming", "Age: 28", None),
        ("1_0", "Ming", "Wei: friend: They row together.", None),
        ("1_0_0", "Ming", "They won.", "May 12, 2022"),
        ("1_0_0#1:T1", "Wei", "Well rowed: thanks!", None),
        ("1_0_0#1:T2", "Ming", "Tea?", None),
        ("1_0_0#1:T3", "Wei", "Yes.", None),
    ]
    assert [session.time for session in dialogue.sessions] == [None, None, None, "2022-05-12 10:00"]
    talk = tuple(turn.id for turn in dialogue.turns[4:])
    assert [(q.id, q.category, q.evidence) for q in corpus.questions] == [
        ("Ming-q000", "profile", ("Age",)),
        ("Ming-q001", "social_relationship", ("1_0",)),
        ("Ming-q002", "events", ("1_0_0",)),
        ("Ming-q003", "dialogues", talk),
    ]
    assert [(one.question_id, one.reference) for one in corpus.dangling] == [("Ming-q002", "7_7_7")]
    assert caplog.messages == ["questions about Dragon, of whom nothing is remembered, are left out"]
