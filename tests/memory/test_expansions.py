from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat
from words import services

from remind.core.errors import DataError
from remind.data.dialogue import Session, Turn
from remind.memory.expansions import asked, extractive, read_annotations
from remind.memory.longmemeval import Join, join_keys
from remind.memory.plain import PlainSystem


@pytest.mark.parametrize(
    ("join", "keys"),
    [
        ("separate", ["w", "a b"]),
        ("merge", ["a b w"]),
        ("replace", ["a b"]),
        ("split-separate", ["w", "a", "b"]),
        ("split-merge", ["a w", "b w"]),
        ("split-replace", ["a", "b"]),
    ],
)
def test_joins(join: Join, keys: list[str]) -> None:
    assert join_keys("w", ["a", "b"], join) == keys
    assert join_keys("w", [], join) == ["w"]


SAMPLE: dict[str, Any] = {
    "sample_id": "d",
    "conversation": {
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [{"speaker": "A", "dia_id": f"D1:{n}", "text": f"text {n}"} for n in range(1, 5)],
        "session_02": [{"speaker": "B", "dia_id": "D2:1", "text": "more"}],
    },
    "observation": {
        "session_1_observation": {
            "A": [["one", "D1:1"], ["both", ["D1:1", "D1:2"]], ["dirty", "D1:2, D1:03"]],
            "B": [["lost", "D7:1"], ["elsewhere", "D2:1"]],
        }
    },
    "session_summary": {"session_1_summary": "They met. It rained."},
}


def annotations(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([SAMPLE | changed]))
    return path


def turns(*numbers: int) -> tuple[Turn, ...]:
    return tuple(Turn(f"D1:{n}", "A", f"text {n}") for n in numbers)


def test_annotations_are_replayed_for_the_turns_they_are_from(tmp_path: Path) -> None:
    held = read_annotations(annotations(tmp_path))["d"]
    whole = Session("S1", None, turns(1, 2, 3, 4))
    stretches = [*((turn,) for turn in whole.turns), whole.turns]
    every = ["one", "both", "dirty"]
    expected = [["one", "both"], ["both", "dirty"], ["dirty"], [], every]
    assert held.replay("userfact", whole, stretches) == expected
    assert held.replay("summ", whole, [whole.turns]) == [["They met.", "It rained."]]
    # of what is left without a turn, nothing tells what it said
    less = Session("S1", None, turns(1, 3, 4))
    assert held.replay("userfact", less, [(turn,) for turn in less.turns]) == [["one"], [], []]
    assert held.replay("summ", less, [less.turns]) == [[]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observation": []}, "observation should be an object"),
        ({"observation": {"session_1_observation": {"A": [["no turns"]]}}}, "a fact should be its text and its turns"),
        ({"observation": {"session_1_observation": {"A": [[3, "D1:1"]]}}}, "a fact should be text"),
        ({"session_summary": {"session_1_summary": 3}}, "session_summary should be text"),
        ({"sample_id": ""}, "sample_id is missing or blank"),
    ],
)
def test_annotations_that_are_none(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = annotations(tmp_path, **changed)
    with pytest.raises(DataError, match=message) as caught:
        read_annotations(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_reply_is_made_up_for_and_told(tmp_path: Path) -> None:
    talk = Session("S", None, (Turn("1", "Ana", "I like tea very much."), Turn("2", "Bo", "Milk is mine.")))
    stretches = [(turn,) for turn in talk.turns]
    said = '{"facts": ["Ana likes tea.", " b\\nc ", "Ana likes tea.", ""]}'
    chat = ScriptedChat(lambda one: "No facts here." if "Bo" in one.messages[1].text else said)
    with PlainSystem("plain").open(tmp_path / "a", "d", services(chat)) as bank:
        found = asked(bank, "userfact", talk, stretches)
    assert found == [["Ana likes tea.", "b c"], *extractive(talk, stretches[1:])]
    assert bank.lost == ["facts: invalid: there is no JSON value in the reply (2)"]
    assert [one.stage for one in chat.asked] == ["facts", "facts"]
    summary = ScriptedChat(lambda one: "<think>hm</think> One. Two.")
    with PlainSystem("plain").open(tmp_path / "b", "d", services(summary)) as bank:
        assert asked(bank, "summ", talk, [talk.turns]) == [["One.", "Two."]]
