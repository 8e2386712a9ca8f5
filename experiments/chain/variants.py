"""Other marks and summaries in place of the built ones: an upper bound, and controls. x0 is the same in all of them.

- built: as the pipeline made them.
- gold: the turns of gold evidence that x0 holds are marked, and the summary repeats them. Where it holds none, x1 and
  x2 are x0.
- none: no marks; the summary is made from all of x0.
- other: the marks as built, with the summary of another question.
- quoted: no marks, and the summary repeats the gold evidence that x0 holds.
- said: the same in reported speech.
- top2, top4, top8: no marks, and the summary repeats so many turns of x0, those of the highest salience.
- chosen: no marks, and the summary repeats the turns of x0 that a model named by number.
- told: the same, and what that model says of them.
- ..._other: the same with the summary of another question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from experiments.chain.chooser import Chooser
from experiments.chain.config import VARIANTS
from remind.check_states import others
from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Question, Turn
from remind.perception.auxiliary import AuxiliaryLLM
from remind.reflect import evidence_in, key_lines, summarise
from remind.states.pyramid import AttentionalState, ReflectiveState, one_line, render, segments_of
from remind.states.records import StateRecord, attentional_of, factual_of, record_of, summary_of
from remind.testbed.ladder import mark_blocks

#: The dialogue of a question, and the question.
Source = tuple[Dialogue, Question]


def with_variant(
    name: str,
    records: Sequence[StateRecord],
    sources: Mapping[str, Source],
    llm: AuxiliaryLLM,
    chooser: Chooser | None = None,
) -> list[StateRecord]:
    """The records with x1 and x2 of a variant.

    Args:
        records: built ones of one split; other questions' summaries come from among them.
        sources: by question id.
        llm: writes the summaries of none: the one that wrote the built ones.
        chooser: the model that chooses turns; chosen and told need one.

    Raises:
        ConfigError: no such variant, no chooser for it, or a single question, which has no other.
        DataError: the dialogues are not those of the states.
    """
    if name not in VARIANTS:
        raise ConfigError(f"no variant {name!r} of states; there are {', '.join(VARIANTS)}")
    if name == "built":
        return list(records)
    states = [attentional_of(record, *sources[record.question_id]) for record in records]
    if name == "gold":
        return [_gold(record, state) for record, state in zip(records, states, strict=True)]
    if name == "other":
        summaries = [summary_of(records[place]) for place in others(len(records))]
    elif name == "none":
        # every turn marked is no turn singled out
        summaries = [state.summary for state in summarise(llm, [_marked(state, lambda _: True) for state in states])]
    else:
        kind = name.removesuffix("_other")
        if kind in ("chosen", "told"):
            if chooser is None:
                raise ConfigError(f"variant {name} needs a model that chooses turns, and chooser names none")
            quotes = chooser.told(states) if kind == "told" else list(map(key_lines, chooser.turns(states)))
        elif kind in ("quoted", "said"):
            form = key_lines if kind == "quoted" else _reported
            quotes = [form(evidence_in(state.factual)) for state in states]
        else:
            quotes = [key_lines(salient(state, int(kind[3]))) for state in states]
        summaries = quotes if kind == name else [quotes[place] for place in others(len(records))]
    if name != "other":
        states = [replace(state, blocks=()) for state in states]
    return [_record(*parts) for parts in zip(records, states, summaries, strict=True)]


def _reported(turns: Sequence[Turn]) -> str:
    return " ".join(f'{turn.speaker} said: "{one_line(turn.text)}"' for turn in turns)


def _gold(record: StateRecord, state: AttentionalState) -> StateRecord:
    gold = evidence_in(state.factual)
    return _record(record, _marked(state, gold.__contains__), key_lines(gold))


def salient(state: AttentionalState, most: int) -> list[Turn]:
    """The turns of the highest salience, in order of time."""
    best = sorted(range(len(state.salience)), key=lambda place: -state.salience[place])[:most]
    return [state.factual.turns[place] for place in sorted(best)]


def with_x0(
    held: str, turns: int, records: Sequence[StateRecord], sources: Mapping[str, Source], seed: int
) -> list[StateRecord]:
    """The records with an x0 of so many turns that holds all of the gold evidence, or none; without x1 and x2.

    Beside the evidence stand retrieved turns, drawn by chance that seed and question fix.

    Args:
        held: "all" or "none".
    """
    made = []
    for record in records:
        state = factual_of(record, *sources[record.question_id])
        places = state.dialogue.positions
        gold = {places[name] for name in state.question.evidence if name in places}
        beside = [position for position in state.positions if position not in gold]
        kept = sorted(gold) if held == "all" else []
        spare = min(turns - len(kept), len(beside))
        if gold and spare >= 0:
            kept += random.Random(f"remind-chain:{seed}:{record.question_id}").sample(beside, spare)
            whole = replace(state, segments=segments_of(state.dialogue, sorted(kept)))
            made.append(record_of(whole, record.split))
    return made


def _marked(state: AttentionalState, chosen: Callable[[Turn], bool]) -> AttentionalState:
    turns = {turn.id for turn in state.factual.turns if chosen(turn)}
    return replace(state, blocks=mark_blocks(state.factual, turns))


def _record(record: StateRecord, state: AttentionalState, summary: str) -> StateRecord:
    return replace(record, x1=render(state), x2=render(ReflectiveState(state, summary)))
