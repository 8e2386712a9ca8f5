"""From a world to its states: retrieval, markers and summaries made from what is known, errors included."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder
from remind.data.dialogue import Dialogue, Question
from remind.pipeline import record_of
from remind.states.parquet import StateRecord, write_manifest, write_part
from remind.states.pyramid import (
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Span,
    Strategy,
    render_answer,
)
from remind.testbed.labels import LabelConfig, told
from remind.testbed.world import Asked, Trait, World, lexicon
from remind.text.strategy import guide


@dataclass
class LadderConfig:
    """What the states of a world show of it."""

    decoys: int = 4
    """Remarks in x0 that belong to other traits, half of them of the same dimension."""
    missed_marks: float = 0.15
    """Share of the evidence that x1 leaves unmarked."""
    false_marks: float = 0.12
    """Share of the other remarks in x0 that x1 marks."""
    wrong_summaries: float = 0.0
    """Share of the summaries that tell another value than the true one; train, dev and test alike."""
    seed: int = 0
    """Of decoys, markers and summaries; they differ from question to question, not from one build to the next."""

    def __post_init__(self) -> None:
        if self.decoys < 0:
            raise ConfigError(f"decoys is {self.decoys}; it must be 0 or more")
        for name in ("missed_marks", "false_marks", "wrong_summaries"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")


def climb(dialogue: Dialogue, asked: Asked, config: LadderConfig) -> ReflectiveState:
    """The states of one question. Chance is fixed by seed and question, one stream for each kind of error.

    So a world with more wrong summaries differs from one with fewer in the summaries alone.
    """
    name = f"{config.seed}:{asked.question.id}"
    factual, marks = _factual(dialogue, asked, config, name)
    attentional = AttentionalState(factual, _blocks(factual, marks))
    rng = random.Random(f"remind-summary:{name}")
    wrong = rng.random() < config.wrong_summaries
    return ReflectiveState(attentional, summary(asked.trait, rng, wrong))


def target(question: Question) -> str | None:
    """y* without its end token. The explanation is empty: the nano backbone answers and does not quote."""
    answer = render_answer(question)
    return None if answer is None else f"<answer>{answer}</answer><explanation></explanation>"


def records(world: World, ladder: LadderConfig, labels: LabelConfig | None = None) -> list[StateRecord]:
    """The states of every question, with training labels as `labels` has them."""
    items = {item.question.id: item for item in world.asked}
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    made = []
    for question in told(world.asked, labels or LabelConfig()):
        state = climb(dialogues[question.dialogue_id], replace(items[question.id], question=question), ladder)
        made.append(replace(record_of(state, str(question.split)), target=target(question)))
    return made


def write_states(
    world: World, out: str | Path, ladder: LadderConfig, labels: LabelConfig | None = None, overwrite: bool = False
) -> Path:
    """Write the states of a world as a folder that training and evaluation read.

    Raises:
        ConfigError: the folder is there and overwrite is off.
    """
    if Path(out).exists() and not overwrite:
        raise ConfigError(f"{out} exists; choose another folder or set overwrite")
    about: dict[str, Any] = {"world": world.config, "ladder": ladder, "labels": labels or LabelConfig()}
    return write_records(records(world, ladder, labels), out, {name: asdict(config) for name, config in about.items()})


def write_records(items: Sequence[StateRecord], out: str | Path, about: Mapping[str, Any]) -> Path:
    """Write a states folder, one part per dialogue, with `about` in its manifest; one that is there is replaced."""
    parts: dict[str, list[StateRecord]] = {}
    for record in items:
        parts.setdefault(record.dialogue_id, []).append(record)
    with atomic_folder(out) as folder:
        for number, part in enumerate(parts.values()):
            write_part(folder, number, part)
        write_manifest(folder, dict(about))
    return Path(out)


def _factual(dialogue: Dialogue, asked: Asked, config: LadderConfig, name: str) -> tuple[FactualState, set[str]]:
    """x0, and the ids of the turns that x1 marks."""
    rng = random.Random(f"remind-marks:{name}")
    units = [*zip(asked.own, asked.counting, strict=True), *((unit, False) for unit in asked.decoys[: config.decoys])]
    marks: set[str] = set()
    for turns, counts in units:
        chance = rng.random()
        if chance >= config.missed_marks if counts else chance < config.false_marks:
            marks.update(turns)
    places = sorted((dialogue.positions[turns[0]], dialogue.positions[turns[-1]]) for turns, _ in units)
    trait = asked.trait
    strategy = Strategy(guide(trait.dimension).reasoning, (trait.speaker,), (trait.topic,) if trait.topic else ())
    return FactualState(dialogue, asked.question, tuple(Segment(*place) for place in places), strategy), marks


def _blocks(factual: FactualState, marks: set[str]) -> tuple[Span, ...]:
    """Runs of marked turns."""
    blocks: list[Span] = []
    runs = factual.runs
    for index, turn in enumerate(factual.turns):
        if turn.id not in marks:
            continue
        if blocks and blocks[-1][1] == index - 1 and runs[index] == runs[index - 1]:
            blocks[-1] = (blocks[-1][0], index)
        else:
            blocks.append((index, index))
    return tuple(blocks)


def summary(trait: Trait, rng: random.Random, wrong: bool = False) -> str:
    """One sentence that tells the value, or another one, in words that stand nowhere else."""
    bank: dict[str, Any] = lexicon()["dimensions"][trait.dimension]
    value = rng.choice([value for value in bank["values"] if value != trait.value]) if wrong else trait.value
    text: str = rng.choice(bank["gist"])
    for slot, word in (
        ("S", trait.speaker),
        ("topic", trait.topic or ""),
        ("gist", rng.choice(bank["values"][value]["gist"])),
    ):
        text = text.replace(f"{{{slot}}}", word)
    return text
