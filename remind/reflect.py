"""From the attentional to the reflective state (Section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from remind.core.errors import DataError
from remind.perception.auxiliary import AuxiliaryLLM
from remind.states.pyramid import AttentionalState, ReflectiveState, blind_state


def summarise(llm: AuxiliaryLLM, states: Sequence[AttentionalState]) -> list[ReflectiveState]:
    """x2 = [x1, G_ref] of each state, with G_ref = LLM(q, x1). The LLM gets the questions without any gold.

    Raises:
        DataError: a summary is empty.
    """
    reflective_states = []
    for state, text in zip(states, llm.summaries([blind_state(state) for state in states]), strict=True):
        if not text.strip():
            raise DataError(f"{llm.name} wrote an empty summary", record=state.factual.question.id)
        reflective_states.append(ReflectiveState(state, text.strip()))
    return reflective_states
