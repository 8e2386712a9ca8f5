"""From the attentional to the reflective state (Section 4.4)."""

from __future__ import annotations

from remind.errors import DataError
from remind.llm.base import AuxiliaryLLM
from remind.llm.blind import blind_state
from remind.pyramid import AttentionalState, ReflectiveState


def summarise(llm: AuxiliaryLLM, state: AttentionalState) -> ReflectiveState:
    """x2 = [x1, G_ref] with G_ref = LLM(q, x1). The LLM gets the question without any gold.

    Raises:
        DataError: the summary is empty.
    """
    summary = llm.summary(blind_state(state)).strip()
    if not summary:
        raise DataError(f"{llm.name} wrote an empty summary", record=state.factual.question.id)
    return ReflectiveState(state, summary)
