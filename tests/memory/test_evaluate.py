"""`evaluate`: any answerer, any data, contexts from states, memory systems and providers of one's own."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from remembering import SAID, locomo_file
from running import use_words
from scripted import ScriptedChat

from remind import Corpus, Dialogue, Question, evaluate, read
from remind.core.errors import ConfigError
from remind.evaluation.contexts import Context
from remind.llm.request import Request
from remind.models.generate import Generation
from remind.states.dataset import write_states
from remind.states.pyramid import FactualState, Strategy, segments_of
from remind.states.records import record_of

ASKED = [("What is the dog called?", "Rex", ["D1:1"]), ("Where did she move?", "Lisbon", ["D2:1"])]


@pytest.fixture(autouse=True)
def _encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_words(monkeypatch.setattr)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    asked = [{"question": text, "answer": gold, "evidence": ids, "category": 4} for text, gold, ids in ASKED]
    return read(locomo_file(tmp_path / "talk.json", ("one", "two"), SAID, asked))


@pytest.fixture
def states(tmp_path: Path, corpus: Corpus) -> Path:
    """x0 shows the first session."""
    records = []
    for dialogue, questions in corpus.by_dialogue():
        for question in questions:
            factual = FactualState(dialogue, question, segments_of(dialogue, range(3)), Strategy(("Think.",)))
            records.append(record_of(factual, "test"))
    write_states(tmp_path / "states", records)
    return tmp_path / "states"


def finds(request: Request) -> str:
    """Answers what its prompt shows."""
    shown = request.messages[-1].text
    word = "Rex" if "dog called?" in shown else "Lisbon"
    return f"<answer>{word if word in shown else 'nobody knows'}</answer>"


class Newest:
    """The newest turns of a dialogue."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def context(self, question: Question, dialogue: Dialogue) -> Context:
        newest = dialogue.turns[-self.turns :]
        text = "\n".join(f"{turn.speaker}: {turn.text}" for turn in newest)
        return Context(text, tuple(turn.id for turn in newest))


def shown(result: Any) -> dict[str, float]:
    return {name: part["overall"]["evidence_recall"]["value"] for name, part in result.report["conditions"].items()}


def test_states_systems_and_ones_own_stand_in_one_table(states: Path, corpus: Corpus, tmp_path: Path) -> None:
    contexts = ["x0", "oracle", "bm25", Newest(3), "no_context"]
    result = evaluate(ScriptedChat(finds), states, contexts, corpus=corpus, out=tmp_path / "run", bootstrap=20)
    assert list(result.report["conditions"]) == ["x0", "oracle", "bm25", "Newest", "no_context"]
    assert shown(result) == {"x0": 0.5, "oracle": 1.0, "bm25": 1.0, "Newest": 0.5, "no_context": 0.0}
    accuracy = {name: part["overall"]["accuracy"]["value"] for name, part in result.report["conditions"].items()}
    assert accuracy == {"x0": 0.5, "oracle": 1.0, "bm25": 1.0, "Newest": 0.5, "no_context": 0.0}
    assert "bm25" in result.table()
    (row,) = [row for row in result.report["memory"]["rows"] if row["at"] == "k"]
    assert (row["system"], row["value"], row["recall"]) == ("bm25", 10, 1.0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<h2>Memory systems</h2>") == page.count("<!DOCTYPE html>") == 1
    assert page.count("tokens of what was retrieved</text>") == 1
    assert (result.save(tmp_path / "saved") / "report.html").read_text() == page
    # again: nothing is asked
    again = evaluate(ScriptedChat(finds), states, contexts, corpus=corpus, out=tmp_path / "run", bootstrap=20)
    assert [part["resumed"] for part in again.report["conditions"].values()] == [4] * 5


def test_the_same_answer_from_other_turns_is_another_row(states: Path, corpus: Corpus, tmp_path: Path) -> None:
    class Told:
        name = "Told"

        def __init__(self, turns: int) -> None:
            self.turns = turns

        def context(self, question: Question, dialogue: Dialogue) -> Context:
            shown = tuple(turn.id for turn in dialogue.turns[: self.turns])
            return Context("", shown, Generation("<answer>so</answer>", 1, 1, True))

    for turns in (0, 100):
        again = evaluate(None, states, [Told(turns)], corpus=corpus, out=tmp_path / "again", bootstrap=20)
        fresh = evaluate(None, states, [Told(turns)], corpus=corpus, out=tmp_path / f"{turns}", bootstrap=20)
        assert shown(again) == shown(fresh) == {"Told": float(turns > 0)}


def test_what_cannot_be_evaluated_is_told_in_a_line(states: Path, corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"no context 'bm52'; there are .*bm25"):
        evaluate(None, states, ["bm52"])
    with pytest.raises(ConfigError, match="bm25 needs the dialogues: set corpus"):
        evaluate(None, states, ["bm25"])
    with pytest.raises(ConfigError, match="evaluate has no setting 'batch'"):
        evaluate(None, states, batch=3)
    with pytest.raises(ConfigError, match="x0 needs states"):
        evaluate(None, corpus)


def test_a_system_is_one_file_as_the_documents_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(System)" in block)
    assert len(shown.splitlines()) <= 60
    (tmp_path / "mine.py").write_text(shown)
    runpy.run_path(str(tmp_path / "mine.py"))
    assert "highlights" in capsys.readouterr().out
