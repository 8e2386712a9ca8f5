"""The configuration of the proof: sizes, conditions, arms, seeds, and the grids that settings are chosen from."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, Literal, get_args

from experiments.proof.arms import ARMS, RECOMMENDED, Condition, Knobs, Null, knobs_of, named
from remind.core.errors import ConfigError
from remind.testbed.built import BuiltConfig, Marks
from remind.testbed.ladder import LadderConfig
from remind.testbed.world import WorldConfig
from sae.ranges import NonNegativeInt, PositiveInt, Range, Seed, Workers, check_ranges

Split = Literal["dev", "test"]
_RATES = [2e-4, 5e-4, 1e-3, 2e-3]
_TRAINED = tuple(arm for arm in ARMS if arm != "base")


def _arms() -> dict[str, list[str]]:
    """All that is worth its time: arms that run every state under some conditions, wrong summaries and controls where
    the gain is."""
    labels = ["clean", *(f"scarce-{n}" for n in (15, 30, 60)), *(f"scarce-{n}-pool" for n in (15, 30, 60))]
    labels += ["none", "noisy-0.2", "noisy-0.4", "paraphrased"]
    some = {
        "sft_flops": ["clean", "scarce-30-pool", "scarce-60-pool", "noisy-0.4"],
        "sft_mixed": ["clean", "noisy-0.4"],
        "distil_20": ["clean", "none", "noisy-0.4"],
        "pra_printed": ["none", "noisy-0.4"],
    }
    arms = {arm: [name for name in some.get(arm, labels) if named(name).teaches(arm)] for arm in _TRAINED}
    wrong = [f"{name}/wrong-{share}" for name in ("none", "noisy-0.4") for share in ("0.2", "0.4")]
    for arm in ("sft_pseudo", "pra_recommended"):
        arms[arm] += [title for title in wrong if named(title).teaches(arm)]
    arms["pra_recommended"] += [f"none/{null}" for null in get_args(Null)]
    return arms


def _grids() -> dict[str, dict[str, list[Any]]]:
    return {
        "sft": {"lr": _RATES},
        "sft_mixed": {"lr": _RATES},
        "sft_pseudo": {"lr": _RATES},
        "distil_20": {"lr": _RATES[:3], "teacher_model_kind": ["live", "base"]},
        "pra_printed": {"lr": [5e-5, *_RATES[:3]]},
        "pra_recommended": {"lr": _RATES[:3], "lambda_hard": [0.05, 0.2]},
    }


@dataclass
class BenchConfig:
    """What every run has in common."""

    world: WorldConfig = field(default_factory=lambda: WorldConfig(train=30, dev=20, test=20))
    """Dialogues to train, choose and report on, 20 questions each, and how hard they are. Its seed is not read."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What the states show. Its seed and wrong_summaries are not read."""
    dev_seed: Seed = 7001
    """World of the dev dialogues, on which settings are chosen."""
    test_seed: Seed = 9001
    """World of the test dialogues. No choice is made by them."""
    batch: PositiveInt = 8
    """Questions per optimiser step."""
    max_new_tokens: PositiveInt = 12
    """Most tokens of an answer."""
    answer_batch: PositiveInt = 64
    """Questions answered at once."""
    upper: PositiveInt = 200
    """Questions answered under x1 and x2, the first ones; the base model answers all."""
    watched: NonNegativeInt = 1
    """Dialogues of dev on which the held-out loss and the collapse guard are measured; 0: none."""
    watch_every: PositiveInt = 25
    """Steps between these measurements; the first and the last step have one in any case."""
    built: BuiltConfig | None = None
    """Build the states from the dialogues with the pipeline, with these settings; None: make them from the known
    evidence, with the errors of `ladder`."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if min(self.world.train, self.world.dev) < 1:
            raise ConfigError("world.train and world.dev must be 1 or more")
        if self.dev_seed == self.test_seed:
            raise ConfigError("dev_seed and test_seed must differ: dev would be test")

    def dialogues(self, split: Split) -> tuple[int, int]:
        """Number and seed of the dialogues that answers are measured on."""
        return (self.world.dev, self.dev_seed) if split == "dev" else (self.world.test, self.test_seed)


@dataclass
class ChooseConfig:
    """How the settings of each arm are chosen: highest mean accuracy under x0 on dev, over conditions and seeds."""

    conditions: tuple[str, ...] = ("noisy-0.4", "scarce-60-pool")
    """Conditions; arms that learn from labels alone see the same labels without a pool."""
    seeds: tuple[Seed, ...] = (101,)
    """Training worlds; none of them may be among the final ones."""
    grids: dict[str, dict[str, list[Any]]] = field(default_factory=_grids)
    """For each arm the values of each of its settings; all combinations are tried. An arm without a grid keeps its
    settings; sft_flops has those of sft."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class ProofConfig:
    """Arms against each other on the synthetic world, under conditions of labels and summaries."""

    model: str
    """Folder of the untrained nano model, or nano: the shipped one."""
    out: str
    """Folder of the results: runs/, results.json, table.md and plot. What is done is not done again."""
    stage: Literal["all", "report"] = "all"
    """report: table and plot of the runs that are there, once all settings have been chosen."""
    workers: Workers = 2
    """Processes of one thread each; 0: this process alone."""
    steps: PositiveInt = 150
    """Optimiser steps; sft_flops takes as many as cost what pra_recommended costs."""
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5)
    """Training worlds of the final runs."""
    arms: dict[str, list[str]] = field(default_factory=_arms)
    """Arms besides the untrained model, and the conditions of each: clean, scarce-N (N labels and nothing else),
    scarce-N-pool (the other training questions without a label), none (no label), noisy-SHARE (of wrong labels),
    paraphrased. After a slash wrong-SHARE, of the summaries; a null control: shuffled (another question's summary),
    same (x1 is x0), marker (random marks); or with bench.built marks-WHOSE, where the marks of x1 come from, and so
    what the summaries are written under: built (the pipeline's grounding), random (as many turns, drawn), none,
    untrained (grounding with SAEs of random weights), gold (the evidence). Others are compared with the first marks."""
    recommended: Knobs = RECOMMENDED
    """Settings of pra_recommended."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """What every run has in common."""
    choose: ChooseConfig = field(default_factory=ChooseConfig)
    """How settings are chosen."""
    resamples: Annotated[int, Range(ge=100)] = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        for arm in (*self.arms, *self.choose.grids):
            if arm not in _TRAINED:
                raise ConfigError(f"no arm {arm!r}; there are {', '.join(sorted(_TRAINED))}")
        for arm, condition in self.cells:
            if not condition.teaches(arm):
                raise ConfigError(f"{arm} has nothing to learn from under {condition.title}; leave that condition out")
            if (condition.marks is None) != (self.bench.built is None):
                raise ConfigError(
                    f"{condition.title}: marks go with built states: set both marks and bench.built, or neither"
                )
            if condition.marks and (condition.wrong or condition.null):
                raise ConfigError(f"{condition.title}: built states have no wrong summaries and no null controls")
        for title in self.arms.get("sft_flops", []):
            if not all(title in self.arms.get(arm, []) for arm in ("sft", "pra_recommended")):
                raise ConfigError(f"arm sft_flops needs sft and pra_recommended under {title}, too, for their cost")
        if same := sorted({*self.seeds} & {*self.choose.seeds}):
            raise ConfigError(f"seed {same[0]} is a final one; choose settings on others")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds must be distinct, and at least one")
        for name in self.choose.conditions:
            named(name)
        for arm, grid in self.choose.grids.items():
            for values in product(*grid.values()):
                knobs_of(arm, self.recommended, dict(zip(grid, values, strict=True)))

    @property
    def cells(self) -> list[tuple[str, Condition]]:
        """Arms and conditions of the table."""
        return [(arm, named(title)) for arm, titles in self.arms.items() for title in titles]

    @property
    def marks(self) -> list[Marks]:
        """Of built states, in the order of the arms."""
        return list(dict.fromkeys(condition.marks for _, condition in self.cells if condition.marks is not None))
