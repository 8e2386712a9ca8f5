"""Other marks and summaries in place of the built ones: an upper bound, and controls. x0 is the same in all of them.

- built: as the pipeline made them.
- gold: the turns of gold evidence that x0 holds are marked, and the summary repeats them. Where it holds none, x1 and
  x2 are x0.
- random: as many turns marked as were, elsewhere; the summary is made from them.
- none: no marks; the summary is made from all of x0.
- other: the marks as built, with the summary of another question.
- null: the marks of random, with the summary of another question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from experiments.chain.config import VARIANTS
from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Question
from remind.perception.auxiliary import AuxiliaryLLM
from remind.reflect import summarise
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, line_of, render
from remind.states.records import StateRecord, attentional_of, summary_of
from remind.testbed.ladder import mark_blocks

#: The dialogue of a question, and the question.
Source = tuple[Dialogue, Question]


def with_variant(
    name: str, records: Sequence[StateRecord], sources: Mapping[str, Source], llm: AuxiliaryLLM, seed: int = 0
) -> list[StateRecord]:
    """The records with x1 and x2 of a variant.

    Args:
        records: built ones of one split; other questions' summaries come from among them.
        sources: by question id.
        llm: writes the summaries of random and none: the one that wrote the built ones.
        seed: of the random marks.

    Raises:
        ConfigError: no such variant, or a single question, which has no other.
        DataError: the dialogues are not those of the states.
    """
    if name not in VARIANTS:
        raise ConfigError(f"no variant {name!r} of states; there are {', '.join(VARIANTS)}")
    if name == "built":
        return list(records)
    states = [attentional_of(record, *sources[record.question_id]) for record in records]
    if name == "gold":
        return [_gold(record, state) for record, state in zip(records, states, strict=True)]
    if name in ("random", "null"):
        states = [_moved(state, random.Random(f"remind-chain:{seed}:{r.question_id}")) for r, state in
                  zip(records, states, strict=True)]  # fmt: skip
    if name in ("other", "null"):
        summaries = [summary_of(records[place]) for place in others(len(records))]
    elif name == "random":
        summaries = _summaries(llm, states)
    else:
        # every turn marked is no turn singled out
        summaries = _summaries(llm, [_marked(state, lambda _: True) for state in states])
        states = [replace(state, blocks=()) for state in states]
    return [_record(*parts) for parts in zip(records, states, summaries, strict=True)]


def others(n: int) -> list[int]:
    """For each of n questions the place of another one: half the list away, so mostly of another dialogue."""
    if n < 2:
        raise ConfigError("a single question has no other one to take the summary from; use more questions")
    return [(place + n // 2) % n for place in range(n)]


def gold_turns(state: FactualState) -> set[str]:
    """Ids of the turns in x0 that are gold evidence, or have a gold image."""
    evidence, images = set(state.question.evidence), set(state.question.images)
    return {turn.id for turn in state.turns if turn.id in evidence or images & {image.index for image in turn.images}}


def _gold(record: StateRecord, state: AttentionalState) -> StateRecord:
    gold = gold_turns(state.factual)
    if not gold:
        return replace(record, x1=record.x0, x2=record.x0)
    lines = [line_of(turn) for turn in state.factual.turns if turn.id in gold]
    return _record(record, _marked(state, gold.__contains__), "\n".join(["Key lines:", *lines]))


def _moved(state: AttentionalState, rng: random.Random) -> AttentionalState:
    """The marks moved round by a random number of turns: as many, in blocks about as long."""
    turns = [turn.id for turn in state.factual.turns]
    marked = {place for start, end in state.blocks for place in range(start, end + 1)}
    shift = rng.randrange(1, len(turns)) if len(turns) > 1 else 0
    return _marked(state, {turns[(place + shift) % len(turns)] for place in marked}.__contains__)


def _marked(state: AttentionalState, chosen: Callable[[str], bool]) -> AttentionalState:
    turns = {turn.id for turn in state.factual.turns if chosen(turn.id)}
    return replace(state, blocks=mark_blocks(state.factual, turns))


def _summaries(llm: AuxiliaryLLM, states: Sequence[AttentionalState]) -> list[str]:
    return [state.summary for state in summarise(llm, states)]


def _record(record: StateRecord, state: AttentionalState, summary: str) -> StateRecord:
    return replace(record, x1=render(state), x2=render(ReflectiveState(state, summary)))
