"""The conditions under which arms are compared: labels, summaries and null controls, as states of a training world."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from experiments.proof.arms import BLIND, LABELS_ONLY
from remind.core.errors import ConfigError
from remind.pipeline import record_of
from remind.states.parquet import StateRecord
from remind.states.pyramid import AttentionalState, ReflectiveState, Span
from remind.testbed.labels import LabelConfig, told
from remind.testbed.ladder import LadderConfig, climb, records, target
from remind.testbed.world import World, WorldConfig, make_world

Null = Literal["shuffled", "same", "marker"]
Rest = Literal["empty", "keep"]


@dataclass(frozen=True)
class Condition:
    """What training is told.

    Attributes:
        name: without what is said of the summaries.
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
        if arm in LABELS_ONLY:
            seen = replace(seen, name=self.name.removesuffix("-pool"), pool=self.labelled is None)
        return replace(seen, wrong=0.0, null=None, rest="empty") if arm in BLIND else seen

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
    raise ConfigError(f"no condition {name!r}; say clean, scarce-60, scarce-60-pool, none, noisy-0.4 or paraphrased")


def training_records(
    world: WorldConfig, ladder: LadderConfig, condition: Condition, seed: int, watched: int, watch_seed: int
) -> list[StateRecord]:
    """States of the training world of a seed under a condition, and of dialogues (split dev) to watch the loss on.

    Args:
        world, ladder: difficulty; their seeds and the numbers of dev and test dialogues are not read.
        watched: dialogues to watch; their labels and summaries are always right.
        watch_seed: their world.
    """
    made = make_world(replace(world, dev=0, test=0, seed=seed))
    steps = replace(ladder, seed=seed, wrong_summaries=condition.wrong)
    if condition.null is None:
        train = records(made, steps, condition.labels(seed))
    else:
        train = _controls(made, steps, condition, seed)
    return train + (split_records(world, ladder, "dev", watched, watch_seed) if watched else [])


def split_records(world: WorldConfig, ladder: LadderConfig, split: str, dialogues: int, seed: int) -> list[StateRecord]:
    """States of a world of dev or test dialogues alone, with right labels and right summaries."""
    numbers: dict[str, Any] = {"train": 0, "dev": 0, "test": 0, split: dialogues}
    return records(make_world(replace(world, **numbers, seed=seed)), replace(ladder, seed=seed, wrong_summaries=0.0))


def _controls(world: World, ladder: LadderConfig, condition: Condition, seed: int) -> list[StateRecord]:
    items = {item.question.id: item for item in world.asked}
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    questions = told(world.asked, condition.labels(seed))
    states = [climb(dialogues[q.dialogue_id], replace(items[q.id], question=q), ladder) for q in questions]
    summaries = [states[other].summary for other in _others(len(states), random.Random(f"remind-shuffled:{seed}"))]
    made = []
    for question, state, summary in zip(questions, states, summaries, strict=True):
        rng = random.Random(f"remind-null:{seed}:{question.id}")
        record = _control(state, summary, condition, rng, str(question.split))
        made.append(replace(record, target=target(question)))
    return made


def _control(state: ReflectiveState, summary: str, condition: Condition, rng: random.Random, split: str) -> StateRecord:
    alone = condition.rest == "empty"
    attentional = state.attentional
    if condition.null == "shuffled":
        record = record_of(ReflectiveState(replace(attentional, blocks=()) if alone else attentional, summary), split)
        return replace(record, x1=record.x0) if alone else record
    if condition.null == "same":
        record = record_of(state, split)
        return replace(record, x1=record.x0, x2=record.x0) if alone else replace(record, x1=record.x0)
    record = record_of(ReflectiveState(random_marks(attentional, rng), state.summary), split)
    return replace(record, x2=record.x1) if alone else record


def _others(n: int, rng: random.Random) -> list[int]:
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
    runs, blocks = state.factual.runs, list[Span]()
    for start, end in sorted(rng.sample(spans, count)):
        if blocks and blocks[-1][1] == start - 1 and runs[start] == runs[start - 1]:
            blocks[-1] = (blocks[-1][0], end)
        else:
            blocks.append((start, end))
    return replace(state, blocks=tuple(blocks))


def describe(condition: Condition, seed: int) -> dict[str, Any]:
    """What a manifest says of it."""
    return {"condition": asdict(condition), "seed": seed}
