"""From a world to its states: retrieval, markers and summaries made from the known answers, errors included; labels of
its training questions; and a world on disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, write_rows
from remind.data.dialogue import Dialogue, Question
from remind.data.readers.refmem import write_refmem
from remind.states.pyramid import (
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Span,
    Strategy,
    render_answer,
)
from remind.states.records import StateRecord, record_of
from remind.testbed.world import Trait, World, WorldConfig, WorldQuestion, fill, lexicon, make_world, statements
from remind.text.words import guide
from sae.ranges import NonNegativeInt, Seed, Share, check_ranges

WORLD, TRUTH, STATES = "world.jsonl", "truth.jsonl", "states"


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


# labels


@dataclass
class LabelConfig:
    """Labels of the training questions. Choices are nested: fewer labels are some of more, less noise some of more."""

    noise: Share = 0.0
    """Share of the labelled training questions whose label is that of another value."""
    labelled: NonNegativeInt | None = None
    """Training questions that keep their label; None: all."""
    pool: bool = True
    """Keep the training questions without a label, for `data.unlabelled`; otherwise they are left out."""
    paraphrased: bool = False
    """Training labels of direct questions in other acceptable words than the first ones."""
    seed: Seed = 0
    """Which questions lose their label or get a wrong one."""


def with_labels(questions: Sequence[WorldQuestion], config: LabelConfig) -> list[WorldQuestion]:
    """The questions in order, those of split train with the labels of `config`; without a pool some are missing."""
    train = [item.question.id for item in questions if item.question.split == "train"]
    order = random.Random(f"remind-scarce:{config.seed}").sample(train, len(train))
    labelled = set(order[: config.labelled])
    result = []
    for item in questions:
        if item.question.split != "train":
            result.append(item)
        elif item.question.id in labelled:
            result.append(replace(item, question=_labelled(item, config)))
        elif config.pool:
            result.append(replace(item, question=replace(item.question, answers=())))
    return result


def _labelled(item: WorldQuestion, config: LabelConfig) -> Question:
    question = item.question
    rng = random.Random(f"remind-noise:{config.seed}:{question.id}")
    if rng.random() < config.noise:
        return replace(question, answers=wrong_answers(question, item.trait, rng))
    if config.paraphrased and question.format == "direct":
        first = rng.choice(question.answers[1:])
        return replace(question, answers=(first, *(form for form in question.answers if form != first)))
    return question


def wrong_answers(question: Question, trait: Trait, rng: random.Random) -> tuple[str, ...]:
    """The answer that follows from another value of the trait, where that is another answer than the right one."""
    values = lexicon()["dimensions"][trait.dimension]["values"]
    others = [value for value in values if value != trait.value]
    if question.format == "direct":
        return tuple(values[rng.choice(others)]["label"])
    if question.format == "single":
        return (rng.choice([letter for letter in "ABCD"[: len(question.options)] if letter not in question.answers]),)
    fits = statements(trait.dimension)
    answers = {
        tuple(letter for letter, text in zip("ABCD", question.options, strict=True) if other in fits[text])
        for other in others
    }
    # a value that fits none of the options gives no label
    return rng.choice(sorted(answer for answer in answers if answer and answer != question.answers))


# a world on disk


@dataclass
class MakeWorldConfig:
    """Write a synthetic world with known answers, and how much its states and its training labels get wrong."""

    out: str
    """Folder for world.jsonl, truth.jsonl and states. Must not exist unless overwrite is set."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The dialogues and their questions. world.jsonl and truth.jsonl depend on nothing else."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What x0, x1 and x2 show."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """Labels of the training questions in the states; world.jsonl keeps the right ones."""
    overwrite: bool = False
    """Replace out where it is a world made earlier."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def write_world(cfg: MakeWorldConfig) -> World:
    """Make a world and write it: RefMem-Bench JSONL, the truth per question, and a states folder. Whole or not at all.

    Raises:
        ConfigError: `out` exists and overwrite is off, or holds something else than a world.
    """
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    if out.exists() and not (out / TRUTH).is_file():
        raise ConfigError(f"{out} is not a world made earlier (it has no {TRUTH}); choose another out")
    world = make_world(cfg.world)
    with atomic_folder(out) as folder:
        write_refmem(world.corpus, folder / WORLD)
        write_rows(folder / TRUTH, truths(world))
        write_states(world, folder / STATES, cfg.ladder, cfg.labels)
    print(f"{len(world.dialogues)} dialogues with {len(world.questions)} questions, and their states: {out}")
    return world


def truths(world: World) -> Iterator[dict[str, Any]]:
    """The trait behind each question, in order: speaker, dimension, topic (or None), value, and turn ids.

    `evidence` and `contrary` are the turns of all remarks that belong to the question, in time order.
    """
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    for item in world.questions:
        question, trait = item.question, item.trait
        remarks = zip(item.remarks, item.is_evidence, strict=True)
        contrary = [turn for turns, is_evidence in remarks if not is_evidence for turn in turns]
        yield {
            "question": question.id,
            "dialogue": question.dialogue_id,
            "split": question.split,
            **{name: getattr(trait, name) for name in ("speaker", "dimension", "topic", "value")},
            "evidence": list(question.evidence),
            "contrary": sorted(contrary, key=dialogues[question.dialogue_id].positions.__getitem__),
        }
