"""The conditions under which arms are compared: labels, summaries and null controls, as states of a training world."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from experiments.proof.arms import ARMS
from remind.core.errors import ConfigError
from remind.states.pyramid import AttentionalState, ReflectiveState, Span
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, make_states, mark_blocks, records, to_record
from remind.testbed.world import World, WorldConfig, make_world

if TYPE_CHECKING:
    from remind.states.parquet import StateRecord

Null = Literal["shuffled", "same", "marker"]
Rest = Literal["empty", "keep"]


@dataclass(frozen=True)
class Condition:
    """Labels, summaries and null control of a training world.

    Attributes:
        name: of the labels alone.
        noise: share of wrong labels. labelled: questions with a label, None: all. pool: keep those without.
        wrong: share of wrong summaries.
        null: a control that takes away what a level adds. shuffled: the summary is that of another question; same: x1
            is x0; marker: as many marks, on remarks drawn at random.
        rest: what becomes of the other level in a null control. empty: it adds nothing either, so that no gain is to
            be expected; keep: it stays, and what is left of the gain is its own.
    """

    name: str
    noise: float = 0.0
    labelled: int | None = None
    pool: bool = True
    paraphrased: bool = False
    wrong: float = 0.0
    null: Null | None = None
    rest: Rest = "empty"

    @property
    def title(self) -> str:
        """Name, with wrong summaries and null control: none, none/wrong-0.2, none/shuffled."""
        parts = [self.name, *([f"wrong-{self.wrong:g}"] if self.wrong else []), *([self.null] if self.null else [])]
        return "/".join(parts)

    @property
    def some_unlabelled(self) -> bool:
        return self.labelled is not None and self.pool

    @property
    def some_labelled(self) -> bool:
        return self.labelled != 0

    def seen_by(self, arm: str) -> Condition:
        """Without what an arm has no use for, so that equal runs are made once."""
        seen = self
        if ARMS[arm].labels_only:
            seen = replace(seen, name=self.name.removesuffix("-pool"), pool=self.labelled is None)
        return replace(seen, wrong=0.0, null=None, rest="empty") if ARMS[arm].blind else seen

    def labels(self, seed: int) -> LabelConfig:
        return LabelConfig(self.noise, self.labelled, self.pool, self.paraphrased, seed)


def named(name: str) -> Condition:
    """The condition of a name: clean, scarce-N, scarce-N-pool, none, noisy-SHARE or paraphrased.

    Raises:
        ConfigError: no such condition.
    """
    kind, _, rest = name.partition("-")
    number, _, pool = rest.partition("-")
    try:
        if name == "clean":
            return Condition(name)
        if name == "none":
            return Condition(name, labelled=0)
        if name == "paraphrased":
            return Condition(name, paraphrased=True)
        if kind == "scarce" and pool in ("", "pool") and int(number) > 0:
            return Condition(name, labelled=int(number), pool=bool(pool))
        if kind == "noisy" and not pool and 0 < float(number) <= 1:
            return Condition(name, noise=float(number))
    except ValueError:
        pass
    known = "clean, scarce-60, scarce-60-pool, none, noisy-0.4, paraphrased"
    raise ConfigError(f"no condition {name!r}; there are {known} and other numbers in their place")


def training_records(
    world: WorldConfig, ladder: LadderConfig, condition: Condition, seed: int, dev: int, dev_seed: int
) -> list[StateRecord]:
    """States of the training world of a seed under a condition, and of dialogues (split dev) to measure the loss on.

    Args:
        world, ladder: difficulty; their seeds and the numbers of dev and test dialogues are not read.
        dev: number of dev dialogues; their labels and summaries are always right.
        dev_seed: their world.
    """
    train_world = make_world(replace(world, dev=0, test=0, seed=seed))
    train_ladder = replace(ladder, seed=seed, wrong_summaries=condition.wrong)
    if condition.null is None:
        train = records(train_world, train_ladder, condition.labels(seed))
    else:
        train = _controls(train_world, train_ladder, condition, seed)
    return train + (split_records(world, ladder, "dev", dev, dev_seed) if dev else [])


def split_records(world: WorldConfig, ladder: LadderConfig, split: str, dialogues: int, seed: int) -> list[StateRecord]:
    """States of a world of dev or test dialogues alone, with right labels and right summaries."""
    numbers: dict[str, Any] = {"train": 0, "dev": 0, "test": 0, split: dialogues}
    return records(make_world(replace(world, **numbers, seed=seed)), replace(ladder, seed=seed, wrong_summaries=0.0))


def _controls(world: World, ladder: LadderConfig, condition: Condition, seed: int) -> list[StateRecord]:
    states = make_states(world, ladder, condition.labels(seed))
    order = _derangement(len(states), random.Random(f"remind-shuffled:{seed}"))
    result = []
    for state, other in zip(states, order, strict=True):
        rng = random.Random(f"remind-null:{seed}:{state.attentional.factual.question.id}")
        result.append(_control(state, states[other].summary, condition, rng))
    return result


def _control(state: ReflectiveState, other_summary: str, condition: Condition, rng: random.Random) -> StateRecord:
    alone = condition.rest == "empty"
    attentional = state.attentional
    if condition.null == "shuffled":
        shown = replace(attentional, blocks=()) if alone else attentional
        record = to_record(ReflectiveState(shown, other_summary))
        return replace(record, x1=record.x0) if alone else record
    if condition.null == "same":
        record = to_record(state)
        return replace(record, x1=record.x0, x2=record.x0) if alone else replace(record, x1=record.x0)
    record = to_record(ReflectiveState(random_marks(attentional, rng), state.summary))
    return replace(record, x2=record.x1) if alone else record


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
