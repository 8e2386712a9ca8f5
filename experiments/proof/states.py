"""The states of a run: made from the known evidence of a world, or built from its dialogues by the pipeline."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from experiments.proof.arms import Condition
from experiments.proof.store import RunStore
from remind.build.states import facts_of, recall_of
from remind.core.errors import ConfigError
from remind.core.files import sha256_json
from remind.core.processes import locked
from remind.states.pyramid import AttentionalState, ReflectiveState, Span
from remind.states.records import blocks_of
from remind.testbed.built import Marks, build_world, marked, train_saes
from remind.testbed.ladder import (
    LabelConfig,
    LadderConfig,
    labelled,
    make_states,
    mark_blocks,
    records,
    to_record,
    with_labels,
    write_records,
)
from remind.testbed.world import World, WorldConfig, make_world

if TYPE_CHECKING:
    from remind.states.records import StateRecord


def training_records(store: RunStore, condition: Condition, seed: int) -> list[StateRecord]:
    """States of the training world of a seed under a condition, and of dialogues (split dev) to measure the loss on.

    Of the store's world and ladder the difficulty is read, and neither seeds nor numbers of dev and test dialogues.
    Labels and summaries of the dev dialogues are always right.
    """
    config = store.config
    train_config = replace(config.world, dev=0, test=0, seed=seed)
    dev = split_records(store, "dev", config.watched, config.dev_seed, condition.marks) if config.watched else []
    if config.built is not None:
        return built_records(store, train_config, condition.marks, condition.labels(seed)) + dev
    train_world = make_world(train_config)
    train_ladder = replace(config.ladder, seed=seed, wrong_summaries=condition.wrong)
    if condition.null is None:
        return records(train_world, train_ladder, condition.labels(seed)) + dev
    return _controls(train_world, train_ladder, condition, seed) + dev


def split_records(
    store: RunStore, split: str, dialogues: int, seed: int, marks: Marks | None = None
) -> list[StateRecord]:
    """States of a world of dev or test dialogues alone, with right labels and right summaries."""
    numbers: dict[str, Any] = {"train": 0, "dev": 0, "test": 0, split: dialogues}
    world = replace(store.config.world, **numbers, seed=seed)
    if store.config.built is not None:
        return built_records(store, world, marks or "built")
    return records(make_world(world), replace(store.config.ladder, seed=seed, wrong_summaries=0.0))


def _controls(world: World, ladder: LadderConfig, condition: Condition, seed: int) -> list[StateRecord]:
    states = make_states(world, ladder, condition.labels(seed))
    order = _derangement(len(states), random.Random(f"remind-shuffled:{seed}"))
    result = []
    for state, other in zip(states, order, strict=True):
        rng = random.Random(f"remind-null:{seed}:{state.attentional.factual.question.id}")
        result.append(_control(state, states[other].summary, condition, rng))
    return result


def _control(state: ReflectiveState, other_summary: str, condition: Condition, rng: random.Random) -> StateRecord:
    attentional = state.attentional
    if condition.null == "shuffled":
        record = to_record(ReflectiveState(replace(attentional, blocks=()), other_summary))
        return replace(record, x1=record.x0)
    if condition.null == "same":
        record = to_record(state)
        return replace(record, x1=record.x0, x2=record.x0)
    record = to_record(ReflectiveState(random_marks(attentional, rng), state.summary))
    return replace(record, x2=record.x1)


def _derangement(n: int, rng: random.Random) -> list[int]:
    """A permutation of 0 … n − 1, n > 1, in which nothing keeps its place (Sattolo's: one single cycle)."""
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        place = rng.randrange(last)
        order[last], order[place] = order[place], order[last]
    return order


def random_marks(state: AttentionalState, rng: random.Random) -> AttentionalState:
    """As many remarks (segments of x0) marked as before, drawn without regard to what they say."""
    spans: list[Span] = []
    for segment in state.factual.segments:
        start = spans[-1][1] + 1 if spans else 0
        spans.append((start, start + segment.end - segment.start))
    marked = {index for start, end in state.blocks for index in range(start, end + 1)}
    count = sum(start in marked for start, _ in spans)
    chosen = rng.sample(spans, count)
    turn_ids = {state.factual.turns[index].id for start, end in chosen for index in range(start, end + 1)}
    return replace(state, blocks=mark_blocks(state.factual, turn_ids))


def built_records(
    store: RunStore, config: WorldConfig, marks: Marks | None, labels: LabelConfig | None = None
) -> list[StateRecord]:
    """States of a world, built from its dialogue files, with these marks and training labels.

    Raises:
        ConfigError: no marks, which built states need.
    """
    from remind.states.dataset import read_states

    built = store.config.built
    if built is None or marks is None:
        raise ConfigError("built states take a condition with marks, and bench.built")
    folder, world = store.out / "built", make_world(config)
    name = sha256_json([asdict(config), asdict(built), store.weights])[:12]
    kind = "untrained" if marks == "untrained" else "built"
    states, variant = folder / f"{name}-{kind}", folder / f"{name}-marks-{marks}"
    # two workers may want the same states at once
    with locked(folder / f"{name}.lock"):
        if not states.exists():
            with locked(folder / "sae.lock"):
                saes = train_saes(built, store.model, folder / f"sae-{kind}", trained=kind == "built")
            build_world(built, world, store.model, saes, states, folder / "cache")
        if not variant.exists():
            write_records(marked(list(read_states(states)), world, marks, built.reader), variant, {"marks": marks})
    return labelled(read_states(variant), with_labels(world.questions, labels or LabelConfig()))


def evidence_in_marks(store: RunStore, marks: Marks) -> dict[str, Any]:
    """Means over the test questions: share of the evidence in x0 and in the marks, and of x0's turns in the marks."""
    records = split_records(store, "test", *store.config.dialogues("test"), marks)
    turns = []
    for record in records:
        shown = len(record.x1.turns)
        turns.append(sum(end - start + 1 for start, end in blocks_of(record.x1)) / shown if shown else 0.0)
    recall = recall_of(map(facts_of, records))["all"]
    return {"x0": recall["x0"], "marked": recall["marked"], "turns": sum(turns) / len(turns)}
