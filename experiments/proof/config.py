"""What the proof is told: sizes, conditions, arms, seeds, and the grid its settings are chosen from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.proof.arms import ARMS, Knobs, knobs_of, recommended
from experiments.proof.bench import Bench, make_bench
from experiments.proof.conditions import Condition, Null, Rest, named
from remind.core.errors import ConfigError
from remind.testbed.ladder import LadderConfig
from remind.testbed.world import WorldConfig

Stage = Literal["choose", "run", "report", "all"]
_RATES = [2e-4, 5e-4, 1e-3, 2e-3]


def _arms() -> tuple[str, ...]:
    return tuple(arm for arm in ARMS if arm != "base")


def _grids() -> dict[str, dict[str, list[Any]]]:
    return {
        "sft": {"lr": _RATES},
        "sft_mixed": {"lr": _RATES},
        "sft_pseudo": {"lr": _RATES},
        "distil_20": {"lr": _RATES[:3], "teacher_weights": ["live", "base"]},
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
    dev_seed: int = 7001
    """World of the dev dialogues, on which settings are chosen."""
    test_seed: int = 9001
    """World of the test dialogues. No choice is made by them."""
    batch: int = 8
    """Questions per optimiser step."""
    max_new_tokens: int = 12
    """Most tokens of an answer."""
    answer_batch: int = 64
    """Questions answered at once."""
    upper: int = 200
    """Questions answered under x1 and x2, the first ones; the base model answers all."""
    watched: int = 1
    """Dialogues of dev on which the loss and the collapse guard look; 0: none."""
    watch_every: int = 25
    """Steps between their looks; 0: only at the end."""

    def __post_init__(self) -> None:
        for name in ("batch", "max_new_tokens", "answer_batch", "upper"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if min(self.watched, self.watch_every) < 0:
            raise ConfigError("watched and watch_every must be 0 or more")
        if min(self.world.train, self.world.dev) < 1:
            raise ConfigError("world.train and world.dev must be 1 or more")
        if self.dev_seed == self.test_seed:
            raise ConfigError("dev_seed and test_seed must differ: dev would be test")

    def bench(self, model: str) -> Bench:
        """Raises ConfigError where model is not a model folder."""
        values = {name: getattr(self, name) for name in Bench.__dataclass_fields__ if name not in ("model", "weights")}
        return make_bench(model, **values)


@dataclass
class ChooseConfig:
    """How the settings of each arm are chosen: best mean accuracy under x0 on dev, over conditions and seeds."""

    conditions: tuple[str, ...] = ("noisy-0.4", "scarce-60-pool")
    """Conditions; arms that learn from labels alone see the same labels without a pool."""
    seeds: tuple[int, ...] = (101,)
    """Training worlds; none of them may be among the final ones."""
    grids: dict[str, dict[str, list[Any]]] = field(default_factory=_grids)
    """For each arm the values of each of its settings; all combinations are tried. An arm without a grid keeps its
    settings; sft_flops has those of sft."""


@dataclass
class TraceConfig:
    """The trajectory (Figure 14): shares of the loss terms, divergences and accuracy on the way."""

    arms: tuple[str, ...] = ("pra_printed", "pra_recommended")
    """Arms that are traced."""
    conditions: tuple[str, ...] = ("noisy-0.4",)
    """Under these conditions, with right summaries; on the first seed alone."""
    every: int = 15
    """Steps between measurements of the answers; 0: nothing is traced."""


@dataclass
class ProofConfig:
    """Arms against each other on the synthetic world, under conditions of labels and summaries."""

    model: str
    """Folder of the untrained nano model, or nano: the shipped one."""
    out: str
    """Folder of the results: runs/, chosen.json, results.json, table.md and plots. What is done is not done again."""
    stage: Stage = "all"
    """choose: settings, on dev. run: the final runs, on test. report: tables and plots of what is there. all: all."""
    workers: int = 2
    """Processes of one thread each; 0: this process alone."""
    steps: int = 150
    """Optimiser steps; sft_flops takes as many as cost what pra_recommended costs."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Training worlds of the final runs."""
    arms: tuple[str, ...] = field(default_factory=_arms)
    """Arms besides the untrained model."""
    conditions: tuple[str, ...] = (
        "clean",
        "scarce-15",
        "scarce-30",
        "scarce-60",
        "scarce-15-pool",
        "scarce-30-pool",
        "scarce-60-pool",
        "none",
        "noisy-0.2",
        "noisy-0.4",
        "paraphrased",
    )
    """clean, scarce-N (N labels and nothing else), scarce-N-pool (the other training questions without a label), none
    (no label), noisy-SHARE (of wrong labels), paraphrased."""
    wrong_summaries: tuple[float, ...] = (0.0, 0.2, 0.4)
    """Shares of wrong summaries, for the arms that see any."""
    arm_conditions: dict[str, list[str]] = field(default_factory=dict)
    """Conditions of an arm that is not run under all of them, by arm."""
    wrong_conditions: list[str] | None = None
    """Conditions under which wrong summaries are tried; None: all."""
    wrong_arms: list[str] | None = None
    """Arms that are tried with wrong summaries; None: all that see any."""
    nulls: tuple[Null, ...] = ("shuffled", "same", "marker")
    """Null controls of pra_recommended. shuffled: another question's summary; same: x1 is x0; marker: random marks."""
    null_conditions: tuple[str, ...] = ("none", "noisy-0.4")
    """Where they are run."""
    null_rest: Rest = "empty"
    """What a control does to the level it is not about. empty: that one adds nothing either, and no gain is to be
    expected. keep: it stays, and what is left of the gain is its own."""
    recommended: Knobs = field(default_factory=recommended)
    """Settings of pra_recommended."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """What every run has in common."""
    choose: ChooseConfig = field(default_factory=ChooseConfig)
    """How settings are chosen."""
    trace: TraceConfig = field(default_factory=TraceConfig)
    """What is traced."""
    resamples: int = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        if self.workers < 0 or self.steps < 1 or self.resamples < 100:
            raise ConfigError("workers must be 0 or more, steps 1 or more, resamples 100 or more")
        known = {arm for arm in ARMS if arm != "base"}
        for arm in (*self.arms, *self.choose.grids, *self.trace.arms, *self.arm_conditions, *(self.wrong_arms or ())):
            if arm not in known:
                raise ConfigError(f"no arm {arm!r}; there are {', '.join(sorted(known))}")
        if "sft_flops" in self.arms and not {"sft", "pra_recommended"} <= set(self.arms):
            raise ConfigError("arm sft_flops needs sft and pra_recommended: its steps follow from what those cost")
        if same := sorted({*self.seeds} & {*self.choose.seeds}):
            raise ConfigError(f"seed {same[0]} is a final one; choose settings on others")
        if len(self.seeds) < 1 or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds must be distinct, and at least one")
        if any(not 0 <= wrong <= 1 for wrong in self.wrong_summaries):
            raise ConfigError("wrong_summaries are shares, from 0 to 1")
        for name in (*self.conditions, *self.null_conditions, *self.choose.conditions, *self.trace.conditions):
            named(name)
        listed = {name for names in self.arm_conditions.values() for name in names} | {*(self.wrong_conditions or ())}
        if strangers := sorted(listed - {*self.conditions}):
            raise ConfigError(f"{strangers[0]} is asked for, but is not among the conditions")
        for arm, grid in self.choose.grids.items():
            knobs_of(arm, self.recommended, {name: values[0] for name, values in grid.items() if values})

    @property
    def found_conditions(self) -> list[Condition]:
        return [named(name) for name in self.conditions]
