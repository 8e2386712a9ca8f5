"""Which runs the proof is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from experiments.proof.arms import ARMS, knobs_of
from experiments.proof.conditions import Condition, named
from experiments.proof.config import ProofConfig
from experiments.proof.store import Spec
from remind.testbed.built import Marks

#: Chosen values by arm.
Chosen = Mapping[str, Mapping[str, Any]]


def takes_part(arm: str, condition: Condition) -> bool:
    """Whether an arm can learn anything of its own under a condition."""
    if ARMS[arm].labels_only:
        return condition.some_labelled
    return condition.some_unlabelled if arm == "sft_pseudo" else True


def grid_runs(cfg: ProofConfig) -> dict[str, list[tuple[dict[str, Any], list[Spec]]]]:
    """For every arm the points of its grid: values, and the runs on dev that they are judged by."""
    result: dict[str, list[tuple[dict[str, Any], list[Spec]]]] = {}
    for arm, grid in cfg.choose.grids.items():
        conditions = [condition for condition in map(named, cfg.choose.conditions) if takes_part(arm, condition)]
        if arm not in cfg.arms or not conditions:
            continue
        for values in product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            knobs = knobs_of(arm, cfg.recommended, point)
            specs = [
                Spec(arm, condition.seen_by(arm), seed, knobs, cfg.steps, "dev")
                for condition, seed in product(conditions, cfg.choose.seeds)
            ]
            result.setdefault(arm, []).append((point, specs))
    return result


def cells(cfg: ProofConfig) -> list[tuple[str, Condition]]:
    """Arms and conditions of the table, null controls last; arms that do not see summaries once for all of them."""
    result: list[tuple[str, Condition]] = []
    for condition in map(named, cfg.conditions):
        arms = [arm for arm in cfg.arms if takes_part(arm, condition)]
        arms = [arm for arm in arms if condition.name in cfg.arm_conditions.get(arm, cfg.conditions)]
        result += [(arm, condition) for arm in arms if ARMS[arm].blind]
        for wrong, arm in product(cfg.wrong_summaries, arms):
            if not ARMS[arm].blind and (not wrong or _may_be_wrong(cfg, arm, condition)):
                result.append((arm, replace(condition, wrong=wrong)))
    if "pra_recommended" in cfg.arms:
        for name, null in product(cfg.null_conditions, cfg.nulls):
            result.append(("pra_recommended", replace(named(name), null=null, rest=cfg.null_rest)))
    if not cfg.marks:
        return result
    return [
        (arm, replace(condition, marks=marks)) for arm, condition in result for marks in _marks(cfg, arm, condition)
    ]


def _marks(cfg: ProofConfig, arm: str, condition: Condition) -> tuple[Marks, ...]:
    """The marks an arm is tried with under a condition; one that sees x0 alone has no use for more than one."""
    all_of_them = cfg.marks_conditions is None or condition.name in cfg.marks_conditions
    return cfg.marks if all_of_them and not ARMS[arm].blind else cfg.marks[:1]


def _may_be_wrong(cfg: ProofConfig, arm: str, condition: Condition) -> bool:
    arms, conditions = cfg.wrong_arms, cfg.wrong_conditions
    return (arms is None or arm in arms) and (conditions is None or condition.name in conditions)


def final_run(cfg: ProofConfig, chosen: Chosen, arm: str, condition: Condition, seed: int, steps: int = 0) -> Spec:
    """The run of a cell and a seed; steps 0: those of the config."""
    traced = arm in cfg.trace.arms and condition.title in cfg.trace.conditions and seed == cfg.seeds[0]
    knobs = knobs_of(arm, cfg.recommended, chosen.get("sft" if arm == "sft_flops" else arm))
    trace = cfg.trace.every if traced else 0
    return Spec(arm, condition.seen_by(arm), seed, knobs, steps or cfg.steps, "test", trace)


def final_runs(cfg: ProofConfig, chosen: Chosen) -> Iterator[tuple[str, Condition, int, Spec]]:
    """Arm, condition, seed and run of every cell but those of sft_flops, seed by seed."""
    # right summaries before wrong ones: the main comparisons are then known first
    ordered = sorted(cells(cfg), key=lambda cell: cell[1].wrong)
    for seed, (arm, condition) in product(cfg.seeds, ordered):
        if arm != "sft_flops":
            yield arm, condition, seed, final_run(cfg, chosen, arm, condition, seed)


def equal_steps(sft: Mapping[str, Any], recommended: Mapping[str, Any]) -> int:
    """Steps of SFT that cost what a run of pra_recommended costs; from the results of both."""
    each = float(sft["flops"]) / max(1, int(sft["steps"]))
    return max(1, round(float(recommended["flops"]) / each)) if each else int(recommended["steps"])
