from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remind.core.errors import DataError
from remind.data.dialogue import Session, Turn
from remind.data.readers.annotations import read_annotations
from remind.memory.expansions import replay

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
    expected = [["one", "both"], ["both", "dirty"], ["dirty"], [], ["one", "both", "dirty"]]
    assert replay(held, whole, stretches) == expected
    # of what is left without a turn, nothing tells what it said
    less = Session("S1", None, turns(1, 3, 4))
    assert replay(held, less, [(turn,) for turn in less.turns]) == [["one"], [], []]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observation": []}, "observation should be an object"),
        ({"observation": {"session_1_observation": {"A": [["no turns"]]}}}, "a fact should be its text and its turns"),
        ({"observation": {"session_1_observation": {"A": [[3, "D1:1"]]}}}, "a fact should be text"),
        ({"sample_id": ""}, "sample_id is missing or blank"),
    ],
)
def test_annotations_that_are_none(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = annotations(tmp_path, **changed)
    with pytest.raises(DataError, match=message) as caught:
        read_annotations(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
