"""Which runs the proof is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from experiments.proof.arms import BLIND, LABELS_ONLY, Knobs, knobs_of
from experiments.proof.bench import Spec
from experiments.proof.conditions import Condition, named
from experiments.proof.config import ProofConfig

#: Chosen values by arm.
Chosen = Mapping[str, Mapping[str, Any]]


def takes_part(arm: str, condition: Condition) -> bool:
    """Whether an arm can learn anything of its own under a condition."""
    if arm in LABELS_ONLY:
        return condition.some_labelled
    return condition.some_unlabelled if arm == "sft_pseudo" else True


def settings(cfg: ProofConfig, arm: str, chosen: Chosen) -> Knobs:
    """Of an arm, with what was chosen for it."""
    return knobs_of(arm, cfg.recommended, chosen.get("sft" if arm == "sft_flops" else arm))


def choices(cfg: ProofConfig) -> dict[str, list[tuple[dict[str, Any], list[Spec]]]]:
    """For every arm its grid: values, and the runs they are judged by. Runs are on dev."""
    found: dict[str, list[tuple[dict[str, Any], list[Spec]]]] = {}
    for arm, grid in cfg.choose.grids.items():
        if arm not in cfg.arms:
            continue
        conditions = [condition for condition in map(named, cfg.choose.conditions) if takes_part(arm, condition)]
        for values in product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            knobs = knobs_of(arm, cfg.recommended, point)
            specs = [
                Spec(arm, condition.seen_by(arm), seed, knobs, cfg.steps, "dev")
                for condition, seed in product(conditions, cfg.choose.seeds)
            ]
            if specs:
                found.setdefault(arm, []).append((point, specs))
    return found


def cells(cfg: ProofConfig) -> list[tuple[str, Condition]]:
    """Arms and conditions of the table, null controls last; arms that do not see summaries once for all of them."""
    found: list[tuple[str, Condition]] = []
    for condition in cfg.found_conditions:
        arms = [arm for arm in cfg.arms if takes_part(arm, condition) and _asked_for(cfg, arm, condition)]
        found += [(arm, condition) for arm in arms if arm in BLIND]
        seeing = [arm for arm in arms if arm not in BLIND]
        for wrong, arm in product(cfg.wrong_summaries, seeing):
            if not wrong or _may_be_wrong(cfg, arm, condition):
                found.append((arm, replace(condition, wrong=wrong)))
    if "pra_recommended" in cfg.arms:
        for name, null in product(cfg.null_conditions, cfg.nulls):
            found.append(("pra_recommended", replace(named(name), null=null, rest=cfg.null_rest)))
    return found


def _asked_for(cfg: ProofConfig, arm: str, condition: Condition) -> bool:
    names = cfg.arm_conditions.get(arm)
    return names is None or condition.name in names


def _may_be_wrong(cfg: ProofConfig, arm: str, condition: Condition) -> bool:
    arms, conditions = cfg.wrong_arms, cfg.wrong_conditions
    return (arms is None or arm in arms) and (conditions is None or condition.name in conditions)


def spec_of(cfg: ProofConfig, chosen: Chosen, arm: str, condition: Condition, seed: int, steps: int = 0) -> Spec:
    """The final run of a cell.

    Args:
        steps: 0: those of the config.
    """
    traced = arm in cfg.trace.arms and condition.title in cfg.trace.conditions and seed == cfg.seeds[0]
    knobs = settings(cfg, arm, chosen)
    trace = cfg.trace.every if traced else 0
    return Spec(arm, condition.seen_by(arm), seed, knobs, steps or cfg.steps, "test", trace)


def final_runs(cfg: ProofConfig, chosen: Chosen) -> Iterator[tuple[str, Condition, int, Spec]]:
    """Arm, condition, seed and run of every cell but those of sft_flops; seed by seed, so that all is soon begun."""
    # right summaries before wrong ones: the main comparisons are then known first
    ordered = sorted(cells(cfg), key=lambda cell: cell[1].wrong)
    for seed, (arm, condition) in product(cfg.seeds, ordered):
        if arm != "sft_flops":
            yield arm, condition, seed, spec_of(cfg, chosen, arm, condition, seed)


def equal_steps(sft: Mapping[str, Any], ours: Mapping[str, Any]) -> int:
    """Steps of SFT that cost what a run of pra_recommended costs; from the results of both."""
    each = float(sft["flops"]) / max(1, int(sft["steps"]))
    return max(1, round(float(ours["flops"]) / each)) if each else int(ours["steps"])
