"""From the attentional to the reflective state (Section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from remind.core.errors import DataError
from remind.data.dialogue import Turn, gold_turns
from remind.perception.auxiliary import AuxiliaryLLM
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, blind_state, turn_lines


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


def quote_evidence(states: Sequence[AttentionalState]) -> list[ReflectiveState]:
    """x2 of each state with the gold evidence that x0 holds in place of a summary; without any it is x1."""
    return [ReflectiveState(state, key_lines(evidence_in(state.factual))) for state in states]


def evidence_in(state: FactualState) -> list[Turn]:
    """The gold evidence in x0, in order of time (see `gold_turns`)."""
    return [state.turns[place] for place in gold_turns(state.question, state.turns)]


def key_lines(turns: Sequence[Turn]) -> str:
    """Turns, quoted with the captions of their images; "" for none."""
    return "\n".join(["Key lines:", *map(turn_lines, turns)]) if turns else ""
