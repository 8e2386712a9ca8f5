from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.perception.auxiliary import OfflineLLM
from remind.reflect import summarise
from remind.states.pyramid import AttentionalState, FactualState, Segment, Strategy, render

TALK = Dialogue("d", (Session("s", None, (Turn("1", "Ana", "I sold my bicycle."), Turn("2", "Ben", "Why?"))),))
GOLD = Question(
    "q", "d", "What did Ana sell?", answers=("a bicycle",), evidence=("1",), images=(), category=4, split="test"
)


def state() -> AttentionalState:
    return AttentionalState(FactualState(TALK, GOLD, (Segment(0, 1),), Strategy(())), ((0, 0),))


class Scripted(OfflineLLM):
    """Writes the same summary for every state, and remembers the states."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.seen = text, []

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        self.seen += states
        return [self.text] * len(states)


def test_the_summary_is_appended_to_an_unchanged_x1_and_the_llm_sees_no_gold() -> None:
    llm = Scripted("  It was the bicycle.\n")
    (reflective,) = summarise(llm, [state()])
    assert reflective.attentional == state()
    assert reflective.summary == "It was the bicycle."
    assert "It was the bicycle." in render(reflective).text
    (seen,) = llm.seen
    blind = replace(GOLD, answers=(), evidence=(), images=(), category=None, split=None)
    assert (seen.factual.question, seen.blocks) == (blind, ((0, 0),))


def test_an_empty_summary_is_refused() -> None:
    with pytest.raises(DataError, match="wrote an empty summary"):
        summarise(Scripted(" \n"), [state()])


def test_offline_end_to_end() -> None:
    assert "I sold my bicycle." in summarise(OfflineLLM(), [state()])[0].summary
