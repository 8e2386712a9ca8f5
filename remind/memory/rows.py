"""The rows of a unit: what a question finds in a bank, or is shown by a control, at every k and token budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from remind.data.dialogue import Dialogue, Question, Turn
from remind.memory.base import Memory, Query, Retrieval
from remind.memory.config import RunMemoryConfig
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import turn_text

#: `Bank.retrieve`, or what stands in for it.
Retrieve = Callable[..., Retrieval]
#: Fields of a question that its row keeps.
_OF_QUESTION = ("category", "dimension", "format", "text", "answers", "evidence")


def row_of(question: Question, retrieve: Retrieve, cfg: RunMemoryConfig, encoder: SentenceEncoder) -> dict[str, Any]:
    """A question and its memories, as JSON; `answer` is filled in later."""
    query = Query.of(question)
    encoder.forget()
    start = time.perf_counter()
    top = retrieve(query, k=max(cfg.k, default=1))
    milliseconds = 1e3 * (time.perf_counter() - start)
    budgets = {str(budget): retrieve(query, budget=budget).memories for budget in cfg.budgets}
    return {
        "question": question.id,
        **{name: getattr(question, name) for name in _OF_QUESTION},
        "ms": milliseconds,
        "top": [_record(memory) for memory in top.memories],
        "budgets": {budget: [_record(memory) for memory in chosen] for budget, chosen in budgets.items()},
        "shown": [memory.text for memory in top.memories[: cfg.shown]],
        "trace": top.trace,
        "answer": None,
    }


def control(name: str, dialogue: Dialogue, encoder: SentenceEncoder) -> Callable[[Question], Retrieve]:
    """What a control shows for each question, as much of it as fits: nothing, all turns (the newest first), or gold
    evidence alone.

    Args:
        name: one of `CONTROLS`.
    """
    if name == "gold":
        return lambda question: _in_order(_memories(dialogue, list(map(dialogue.turn, question.evidence)), encoder))
    whole = _in_order(_memories(dialogue, list(reversed(dialogue.turns)) if name == "full_context" else [], encoder))
    return lambda question: whole


def _memories(dialogue: Dialogue, turns: Sequence[Turn], encoder: SentenceEncoder) -> list[Memory]:
    tokens = encoder.count_many([turn_text(turn) for turn in turns])
    times = [turn.time or dialogue.session_of[turn.id].time for turn in turns]
    return [
        Memory(turn.id, turn_text(turn), "turn", (turn.id,), when, 0.0, count, dialogue.positions[turn.id])
        for turn, when, count in zip(turns, times, tokens, strict=True)
    ]


def _in_order(memories: Sequence[Memory]) -> Retrieve:
    def first(query: Query, k: int | None = None, budget: int | None = None) -> Retrieval:
        chosen: list[Memory] = []
        spent = 0
        for memory in memories[:k]:
            spent += memory.tokens
            if budget is not None and spent > budget:
                break
            chosen.append(memory)
        return Retrieval(tuple(chosen), "")

    return first


def _record(memory: Memory) -> list[Any]:
    return [memory.id, memory.sources, memory.tokens, memory.time]
