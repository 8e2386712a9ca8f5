"""Questions as an auxiliary LLM may see them: without gold."""

from __future__ import annotations

from dataclasses import replace

from remind.data.dialogue import Question
from remind.states.pyramid import AttentionalState


def blind(question: Question) -> Question:
    """The question without answers, evidence, gold images, split and category (a category tells the unanswerable)."""
    return replace(question, answers=(), evidence=(), images=(), category=None, split=None)


def blind_state(state: AttentionalState) -> AttentionalState:
    """x1 of the blind question."""
    return replace(state, factual=replace(state.factual, question=blind(state.factual.question)))
