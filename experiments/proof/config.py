"""The configuration of the proof: sizes, conditions, arms, seeds, and the grids that settings are chosen from."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, Literal

from experiments.proof.arms import ARMS, RECOMMENDED, Knobs, knobs_of
from experiments.proof.conditions import Null, Rest, named
from experiments.proof.store import BenchConfig
from remind.core.errors import ConfigError
from remind.testbed.built import Marks
from sae.ranges import NonNegativeInt, PositiveInt, Range, Seed, Share, Workers, check_ranges

Stage = Literal["choose", "run", "report", "all"]
_RATES = [2e-4, 5e-4, 1e-3, 2e-3]
_TRAINED = tuple(arm for arm in ARMS if arm != "base")


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
class TraceConfig:
    """The trajectory (Figure 14): shares of the loss terms, divergences and accuracy on the way."""

    arms: tuple[str, ...] = ("pra_printed", "pra_recommended")
    """Arms that are traced."""
    conditions: tuple[str, ...] = ("noisy-0.4",)
    """Under these conditions, with right summaries; on the first seed alone."""
    every: NonNegativeInt = 15
    """Steps between measurements of the answers; 0: nothing is traced."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class ProofConfig:
    """Arms against each other on the synthetic world, under conditions of labels and summaries."""

    model: str
    """Folder of the untrained nano model, or nano: the shipped one."""
    out: str
    """Folder of the results: runs/, chosen.json, results.json, table.md and plots. What is done is not done again."""
    stage: Stage = "all"
    """choose: settings, on dev. run: the final runs, on test. report: tables and plots of what is there. all: all."""
    workers: Workers = 2
    """Processes of one thread each; 0: this process alone."""
    steps: PositiveInt = 150
    """Optimiser steps; sft_flops takes as many as cost what pra_recommended costs."""
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5)
    """Training worlds of the final runs."""
    arms: tuple[str, ...] = _TRAINED
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
    wrong_summaries: tuple[Share, ...] = (0.0, 0.2, 0.4)
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
    marks: tuple[Marks, ...] = ()
    """With bench.built: where the marks of x1 come from, and so what the summaries are written under. The first one is
    what the others are compared with. built: the pipeline's grounding; random: as many turns, drawn; none: no marks;
    untrained: grounding with SAEs of random weights; gold: the evidence."""
    marks_conditions: list[str] | None = None
    """Conditions under which all of them are tried, the others under the first alone; None: all."""
    recommended: Knobs = RECOMMENDED
    """Settings of pra_recommended."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """What every run has in common."""
    choose: ChooseConfig = field(default_factory=ChooseConfig)
    """How settings are chosen."""
    trace: TraceConfig = field(default_factory=TraceConfig)
    """What is traced."""
    resamples: Annotated[int, Range(ge=100)] = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        for arm in (*self.arms, *self.choose.grids, *self.trace.arms, *self.arm_conditions, *(self.wrong_arms or ())):
            if arm not in _TRAINED:
                raise ConfigError(f"no arm {arm!r}; there are {', '.join(sorted(_TRAINED))}")
        if "sft_flops" in self.arms and not {"sft", "pra_recommended"} <= set(self.arms):
            raise ConfigError("arm sft_flops needs sft and pra_recommended: its steps follow from what those cost")
        if same := sorted({*self.seeds} & {*self.choose.seeds}):
            raise ConfigError(f"seed {same[0]} is a final one; choose settings on others")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds must be distinct, and at least one")
        if bool(self.marks) != (self.bench.built is not None):
            raise ConfigError("marks go with built states: set both marks and bench.built, or neither")
        if self.marks and (self.nulls or any(self.wrong_summaries)):
            raise ConfigError("built states have marks in place of nulls and wrong_summaries: set nulls [] and [0.0]")
        for name in (*self.conditions, *self.null_conditions, *self.choose.conditions, *self.trace.conditions):
            named(name)
        limited = {name for names in self.arm_conditions.values() for name in names}
        limited |= {*(self.wrong_conditions or ()), *(self.marks_conditions or ())}
        if unknown := sorted(limited - {*self.conditions}):
            where = "arm_conditions, wrong_conditions or marks_conditions"
            raise ConfigError(f"{unknown[0]} is in {where}, but not among the conditions")
        for arm, grid in self.choose.grids.items():
            for values in product(*grid.values()):
                knobs_of(arm, self.recommended, dict(zip(grid, values, strict=True)))
