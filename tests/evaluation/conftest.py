"""Records of states, and an encoder that needs no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_answers import Lines

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.evaluation.config import EvaluateConfig
from remind.states import dataset
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of


@pytest.fixture(autouse=True)
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow tests have the real encoder."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("remind.models.encoder.SentenceEncoder", Lines)


def record(question_id: str = "q", split: str = "test", **changes: object) -> StateRecord:
    """Six turns of which x0 holds the first four, one image in turn t1 and one in t5."""
    turns = tuple(
        Turn(f"t{n}", "Ana", f"{question_id} line {n}", images=(Image(n // 4, caption="x"),) if n in (1, 5) else ())
        for n in range(6)
    )
    dialogue = Dialogue(f"d-{question_id}", (Session("s", None, turns),))
    question = Question(question_id, dialogue.id, "why?", answers=("so",), evidence=("t1", "t5"))
    question = replace(question, **changes)  # type: ignore[arg-type]
    factual = FactualState(dialogue, question, (Segment(0, 3),), Strategy(("think",), entities=("line",)))
    attentional = AttentionalState(factual, ((1, 1),), (0.5, 1.5, 0.0, 0.0))
    return record_of(ReflectiveState(attentional, "because"), split)


@pytest.fixture
def make_record() -> Callable[..., StateRecord]:
    return record


@pytest.fixture
def write_states(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: StateRecord, name: str = "states") -> Path:
        # a folder has dialogues in the order of their names
        names = list(dict.fromkeys(one.dialogue_id for one in records))
        own = [replace(one, dialogue_id=f"{names.index(one.dialogue_id):02d}-{one.dialogue_id}") for one in records]
        dataset.write_states(tmp_path / name, own, {"inputs": {"made.json": "0" * 64}, "llm": "none"})
        return tmp_path / name

    return write


@pytest.fixture
def six() -> list[StateRecord]:
    """Two of each format, one visual, two of LoCoMo's categories, one without evidence, and one for training."""
    options = ("red", "green", "blue", "grey")
    belief, visual = {"dimension": "belief_modeling"}, {"dimension": "personalized_visual_baselines"}
    return [
        record("s1", format="single", options=options, answers=("B",), **belief),
        record("m1", format="multi", options=options, answers=("A", "D"), **belief),
        record("v1", format="single", options=options, answers=("A",), evidence=(), images=(0, 1), **visual),
        record("d1", answers=("a hiking trip", "hiking"), category=4),
        record("d2", answers=("No information available",), evidence=(), category=5),
        record("m2", format="multi", options=options, answers=("C",)),
        record("t1", split="train"),
    ]


@pytest.fixture
def local(tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path]) -> EvaluateConfig:
    out = str(tmp_path / "out")
    return EvaluateConfig(str(write_states(*six)), "nano-untrained", out, max_new_tokens=6, batch_size=2, bootstrap=20)


@pytest.fixture
def cfg(local: EvaluateConfig) -> EvaluateConfig:
    return replace(local, answers="server", model="a name")
