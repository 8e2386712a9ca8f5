"""From a world to its states: retrieval, markers and summaries made from the known answers, errors included."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder
from remind.data.dialogue import Dialogue, Question
from remind.states.pyramid import (
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Span,
    Strategy,
    render_answer,
)
from remind.states.records import StateRecord
from remind.testbed.labels import LabelConfig, with_labels
from remind.testbed.lexicon import fill, lexicon
from remind.testbed.world import Trait, World, WorldQuestion
from remind.text.strategy import guide
from sae.ranges import NonNegativeInt, Share, check_ranges


@dataclass
class LadderConfig:
    """What the states of a world show of it."""

    decoys: NonNegativeInt = 4
    """Remarks in x0 that belong to other traits, half of them of the same dimension."""
    missed_marks: Share = 0.15
    """Share of the evidence that x1 leaves unmarked."""
    false_marks: Share = 0.12
    """Share of the other remarks in x0 that x1 marks."""
    wrong_summaries: Share = 0.0
    """Share of the summaries that name another value than the true one; train, dev and test alike."""
    seed: NonNegativeInt = 0
    """Of decoys, markers and summaries; they differ from question to question, not from one build to the next."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def make_state(dialogue: Dialogue, item: WorldQuestion, config: LadderConfig) -> ReflectiveState:
    """The states of one question. Chance is fixed by seed and question, one stream for each kind of error.

    So a world with more wrong summaries differs from one with fewer in the summaries alone.
    """
    name = f"{config.seed}:{item.question.id}"
    factual, marked_turns = _factual(dialogue, item, config, name)
    attentional = AttentionalState(factual, mark_blocks(factual, marked_turns))
    rng = random.Random(f"remind-summary:{name}")
    wrong = rng.random() < config.wrong_summaries
    return ReflectiveState(attentional, summary(item.trait, rng, wrong))


def make_states(world: World, ladder: LadderConfig, labels: LabelConfig | None = None) -> list[ReflectiveState]:
    """The states of every question, with training labels as `labels` has them."""
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    return [
        make_state(dialogues[item.question.dialogue_id], item, ladder)
        for item in with_labels(world.questions, labels or LabelConfig())
    ]


def target(question: Question) -> str | None:
    """y* without its end token. The explanation is empty: the nano backbone answers and does not quote."""
    answer = render_answer(question)
    return None if answer is None else f"<answer>{answer}</answer><explanation></explanation>"


def to_record(state: ReflectiveState) -> StateRecord:
    """The record of a state, with the target of this world."""
    from remind.states.records import record_of

    question = state.attentional.factual.question
    return replace(record_of(state, str(question.split)), target=target(question))


def records(world: World, ladder: LadderConfig, labels: LabelConfig | None = None) -> list[StateRecord]:
    """The records of `make_states`."""
    return [to_record(state) for state in make_states(world, ladder, labels)]


def write_states(world: World, out: str | Path, ladder: LadderConfig, labels: LabelConfig | None = None) -> Path:
    """Write the states of a world as a folder that training and evaluation read. Raises ConfigError if it exists."""
    if Path(out).exists():
        raise ConfigError(f"{out} exists; choose another folder")
    about: dict[str, Any] = {"world": world.config, "ladder": ladder, "labels": labels or LabelConfig()}
    return write_records(records(world, ladder, labels), out, {name: asdict(config) for name, config in about.items()})


def labelled(records: Iterable[StateRecord], questions: Sequence[WorldQuestion]) -> list[StateRecord]:
    """Records of these questions, with their answers and targets of this world; others are left out."""
    known = {item.question.id: item.question for item in questions}
    kept = [(record, known[record.question_id]) for record in records if record.question_id in known]
    return [replace(record, answers=question.answers, target=target(question)) for record, question in kept]


def write_records(items: Sequence[StateRecord], out: str | Path, about: Mapping[str, Any]) -> Path:
    """Write a states folder with `about` in its manifest; one that is there is replaced."""
    from remind.states import dataset

    with atomic_folder(out) as folder:
        dataset.write_states(folder, items, about)
    return Path(out)


def _factual(dialogue: Dialogue, item: WorldQuestion, config: LadderConfig, name: str) -> tuple[FactualState, set[str]]:
    """x0, and the ids of the turns that x1 marks."""
    rng = random.Random(f"remind-marks:{name}")
    own = zip(item.remarks, item.is_evidence, strict=True)
    remarks = [*own, *((turns, False) for turns in item.decoys[: config.decoys])]
    marked_turns: set[str] = set()
    for turns, is_evidence in remarks:
        chance = rng.random()
        if chance >= config.missed_marks if is_evidence else chance < config.false_marks:
            marked_turns.update(turns)
    places = sorted((dialogue.positions[turns[0]], dialogue.positions[turns[-1]]) for turns, _ in remarks)
    trait = item.trait
    strategy = Strategy(guide(trait.dimension).reasoning, (trait.speaker,), (trait.topic,) if trait.topic else ())
    return FactualState(dialogue, item.question, tuple(Segment(*place) for place in places), strategy), marked_turns


def mark_blocks(factual: FactualState, marked_turns: set[str]) -> tuple[Span, ...]:
    """The blocks of x1 that mark these turns (ids): runs of them that no gap between segments cuts."""
    from remind.grounding import select_blocks

    marked = [float(turn.id in marked_turns) for turn in factual.turns]
    return tuple(select_blocks(marked, [0] * len(marked), threshold=0.5, window=0, run=factual.runs))


def summary(trait: Trait, rng: random.Random, wrong: bool = False) -> str:
    """One sentence that names the value, or another one, in words that stand nowhere else."""
    words: dict[str, Any] = lexicon()["dimensions"][trait.dimension]
    value = rng.choice([value for value in words["values"] if value != trait.value]) if wrong else trait.value
    text = rng.choice(words["gist"])
    return fill(text, S=trait.speaker, topic=trait.topic or "", gist=rng.choice(words["values"][value]["gist"]))
