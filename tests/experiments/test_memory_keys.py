from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from words import WordEncoder, services

from experiments.evidence.data import load
from experiments.memory.keys import MemoryKeysConfig, measure, memory_keys, systems

TEXTS = ["my boat leaks badly", "we bought bread", "the piano is out of tune", "I sail every summer", "bread is cheap"]
QUESTIONS = [
    {"question": "What is wrong with the boat?", "evidence": ["D1:1", "D2:2"], "category": 1, "answer": "a"},
    {"question": "Who plays the piano?", "evidence": ["D1:3"], "category": 5, "adversarial_answer": "b"},
    {"question": "What was told of bread in June 2023?", "evidence": ["D2:2", "D2:5"], "category": 2, "answer": "c"},
    {"question": "Nothing to find?", "evidence": [], "category": 4, "answer": "d"},
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Two dialogues of two sessions with the same words, in May and June; a fact for the first turn of each."""
    samples = []
    for name in ("one", "two"):
        conversation: dict[str, object] = {}
        for number, month in ((1, "May"), (2, "June")):
            conversation[f"session_{number}_date_time"] = f"1:00 pm on 10 {month}, 2023"
            conversation[f"session_{number}"] = [
                {"speaker": "AB"[n % 2], "dia_id": f"D{number}:{n}", "text": text}
                for n, text in enumerate(TEXTS, start=1)
            ]
        facts = {f"session_{n}_observation": {"A": [["What is wrong is the boat", f"D{n}:1"]]} for n in (1, 2)}
        samples.append({"sample_id": name, "conversation": conversation, "qa": QUESTIONS, "observation": facts})
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps(samples))
    return str(path)


def test_recall_is_the_share_of_gold_turns_that_are_found(file: str) -> None:
    asked, _ = load([file])
    cfg = MemoryKeysConfig([file], "out", k=2, budgets=(12,))
    found = {name: measure(system, asked, services(), cfg) for name, system in systems(file, True).items()}
    assert all(len(one.recall["@2"]) == 6 for one in found.values())  # category 5 too, without evidence none
    encoder = WordEncoder()
    texts = [f"{'AB'[n % 2]}: {text}" for _ in range(2) for n, text in enumerate(TEXTS, start=1)]
    scores = encoder.encode([str(one["question"]) for one in QUESTIONS[:3]]) @ encoder.encode(texts).T
    names = [f"D{session}:{n}" for session in (1, 2) for n in range(1, 6)]
    for place, row in enumerate(scores.double().numpy()):
        best = {names[at] for at in np.argsort(-row, kind="stable")[:2]}
        gold = set(QUESTIONS[place]["evidence"])
        expected = len(gold & best) / len(gold)
        assert found["turn"].recall["@2"][place] == found["turn"].recall["@2"][place + 3] == expected
    # the same words were said in May: by time those of June come first
    assert (found["turn"].recall["@2"][2], found["turn, time"].recall["@2"][2]) == (0.5, 1.0)
    assert found["turn"].ids["@2"][:2] == found["turn, time"].ids["@2"][:2]
    # the evidence of a session is found with all of its words, over the budget with none
    assert found["session"].recall["@2"] == [1.0] * 6
    assert found["session"].recall["12 tokens"] == [0.0] * 6
    assert found["session"].tokens["@2"] == [2.0 * sum(len(text.split()) + 1 for text in TEXTS)] * 6


def test_the_result_has_a_row_for_each_cell(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.memory.keys.HoldingEncoder", WordEncoder)
    cfg = MemoryKeysConfig([file], str(tmp_path / "out"), file, k=1, budgets=(30,), resamples=20)
    result = memory_keys(cfg)
    names = systems(file, True)
    assert [(row["system"], row["at"]) for row in result["rows"]] == [
        (n, at) for n in names for at in ("@1", "30 tokens")
    ]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rows"] == result["rows"]
    (month,) = (
        r for r in result["months"] if (r["system"], r["questions"], r["at"]) == ("turn, time", "names a month", "@1")
    )
    assert (month["n"], month["value"]) == (2, month["second"] - month["first"])
    others = [row for row in result["months"] if row["questions"] == "names none"]
    assert all(row["same"] == row["n"] == 4 for row in others)
    assert "| locomo | round | session | all | @1 |" in capsys.readouterr().out
