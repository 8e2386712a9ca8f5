from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from words import WordEncoder, services

from experiments.evidence.data import load
from experiments.memory.keys import MemoryKeysConfig, measure, memory_keys, systems
from experiments.memory.published import IndexedTurn, PublishedConfig, corpus, published
from remind.memory.longmemeval import Join

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


#: A gold session of three user turns, the second with evidence, and a turn of another session.
TURNS = (
    IndexedTurn("answer_x_1", "u1", False, ("f1",)),
    IndexedTurn("answer_x_3", "u2", True, ("f2",)),
    IndexedTurn("answer_x_5", "u3", False, None),
    IndexedTurn("filler_1", "u4", False, ()),
)


def searched(join: Join, official_quirks: bool = True) -> tuple[set[str], set[str], int]:
    """Texts, gold ids and number of entries."""
    entries = list(corpus(TURNS, join, official_quirks))
    return {text for _, text in entries}, {name for name, _ in entries if name.startswith("answer")}, len(entries)


def test_the_published_corpus_with_and_without_its_quirks() -> None:
    assert searched("merge") == ({"u1", "f2 u2", "u3"}, {"answer_x_3"}, 3)
    assert searched("replace") == ({"u1", "f2", "u3"}, {"answer_x_3"}, 3)
    assert searched("separate") == ({"u1", "u2", "u3", "u4", "f1", "f2"}, {"answer_x_1", "answer_x_3"}, 6)
    assert searched("merge", False) == ({"f1 u1", "f2 u2", "u3", "u4"}, {"answer_x_3"}, 4)
    assert searched("separate", False) == ({"u1", "u2", "u3", "u4", "f1", "f2"}, {"answer_x_3"}, 6)


def test_what_the_published_corpus_finds(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.memory.published.HoldingEncoder", WordEncoder)
    result = published(PublishedConfig([file], str(tmp_path / "out.json"), file, k=2, resamples=20))
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == result["rows"]
    by = {(row["join"], row["recall"], row["official_quirks"]): row for row in result["rows"]}
    assert len(by) == 6 * 2 * 2
    assert all(row["n"] == 6 for (_, _, quirks), row in by.items() if not quirks)
    # the boat's question alone, of each dialogue, has a gold turn with a fact: others are not searched
    assert {by[join, "any", True]["n"] for join in ("merge", "replace", "split-merge", "split-replace")} == {2}
    # facts of other turns of a gold session are gold as well
    assert by["separate", "any", True]["value"] >= by["separate", "any", False]["value"]
    assert by["separate", "all", True]["value"] <= by["separate", "all", False]["value"]
