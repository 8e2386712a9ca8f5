"""The proof from start to end: choose settings on dev, run all arms on fresh seeds, report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from experiments.proof.arms import Condition, knobs_of, named
from experiments.proof.config import ProofConfig
from experiments.proof.report import Cell, Chosen, report
from experiments.proof.store import RunStore, Spec, accuracy, base_spec, open_store, run_all
from remind.core.errors import ConfigError


def prove(cfg: ProofConfig) -> Path:
    """Do the stages asked for; prints where the results are.

    Returns:
        The folder of the results.

    Raises:
        ConfigError: settings that cannot be run, or a stage that needs an earlier one.
        RemindError: of the first run that failed; those that were done stay.
    """
    store = open_store(cfg.bench, cfg.model, cfg.out)
    scores = choose(cfg, store)
    chosen = {arm: max(points, key=lambda row: row["accuracy"])["values"] for arm, points in scores.items()}
    if cfg.stage == "all":
        run(cfg, store, chosen)
    paths = report(cfg, store, chosen, scores, collect(cfg, store, chosen))
    print(f"results are in {', '.join(str(path) for path in paths)}")
    return store.out


def choose(cfg: ProofConfig, store: RunStore) -> dict[str, list[dict[str, Any]]]:
    """Run every point of every arm's grid; the one with the highest mean accuracy under x0 on dev is chosen, of equals
    the first.

    Returns:
        For each arm its points: values, accuracy, and that of each run.
    """
    grid = grid_runs(cfg)
    specs = [spec for points in grid.values() for _, runs in points for spec in runs]
    if cfg.stage == "report" and not all(map(store.done, specs)):
        raise ConfigError(f"{store.out}: not all settings have been chosen yet; run with --stage all first")
    results = run_all(store, specs, cfg.workers, "choose")
    scores: dict[str, list[dict[str, Any]]] = {}
    for arm, points in grid.items():
        for values, runs in points:
            reached = {
                f"{spec.condition.title}, seed {spec.seed}": accuracy(results[store.key(spec)]["right"]["x0"])
                for spec in runs
            }
            row = {"values": values, "accuracy": sum(reached.values()) / len(reached), "runs": reached}
            scores.setdefault(arm, []).append(row)
    return scores


def run(cfg: ProofConfig, store: RunStore, chosen: Chosen) -> None:
    """All final runs; those of sft_flops last, when it is known what pra_recommended costs."""
    bases = [base_spec("test", marks) for marks in cfg.marks] or [base_spec("test"), base_spec("dev")]
    run_all(store, [*bases, *(spec for *_, spec in final_runs(cfg, chosen))], cfg.workers, "run")
    if late := [spec for *_, spec in _equal_flops(cfg, store, chosen)]:
        run_all(store, late, cfg.workers, "run at equal FLOPs")


def _equal_flops(cfg: ProofConfig, store: RunStore, chosen: Chosen) -> list[tuple[str, Condition, int, Spec]]:
    """The runs of sft_flops, where those of sft and pra_recommended are done."""
    result = []
    for arm, condition in cfg.cells:
        for seed in cfg.seeds if arm == "sft_flops" else ():
            pair = [final_run(cfg, chosen, one, condition, seed) for one in ("sft", "pra_recommended")]
            if all(store.done(spec) for spec in pair):
                steps = equal_steps(*(store.result(spec) for spec in pair))
                result.append((arm, condition, seed, final_run(cfg, chosen, arm, condition, seed, steps)))
    return result


def collect(cfg: ProofConfig, store: RunStore, chosen: Chosen) -> dict[Cell, dict[int, dict[str, Any]]]:
    """Results by arm and condition, by seed; those of runs that are not done are missing."""
    results: dict[Cell, dict[int, dict[str, Any]]] = {}
    missing = 0
    for arm, condition, seed, spec in [*final_runs(cfg, chosen), *_equal_flops(cfg, store, chosen)]:
        if store.done(spec):
            results.setdefault((arm, condition.title), {})[seed] = store.result(spec)
        else:
            missing += 1
    if missing:
        print(f"{missing} runs are not done yet; the tables are of the others", file=sys.stderr)
    return results


# which runs there are


def grid_runs(cfg: ProofConfig) -> dict[str, list[tuple[dict[str, Any], list[Spec]]]]:
    """For every arm the points of its grid: values, and the runs on dev that they are judged by."""
    result: dict[str, list[tuple[dict[str, Any], list[Spec]]]] = {}
    for arm, grid in cfg.choose.grids.items():
        conditions = [condition for condition in map(named, cfg.choose.conditions) if condition.teaches(arm)]
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


def final_run(cfg: ProofConfig, chosen: Chosen, arm: str, condition: Condition, seed: int, steps: int = 0) -> Spec:
    """The run of a cell and a seed; steps 0: those of the config."""
    knobs = knobs_of(arm, cfg.recommended, chosen.get("sft" if arm == "sft_flops" else arm))
    return Spec(arm, condition.seen_by(arm), seed, knobs, steps or cfg.steps)


def final_runs(cfg: ProofConfig, chosen: Chosen) -> Iterator[tuple[str, Condition, int, Spec]]:
    """Arm, condition, seed and run of every cell but those of sft_flops, seed by seed."""
    # right summaries before wrong ones: the main comparisons are then known first
    ordered = sorted(cfg.cells, key=lambda cell: cell[1].wrong)
    for seed, (arm, condition) in product(cfg.seeds, ordered):
        if arm != "sft_flops":
            yield arm, condition, seed, final_run(cfg, chosen, arm, condition, seed)


def equal_steps(sft: Mapping[str, Any], recommended: Mapping[str, Any]) -> int:
    """Steps of SFT that cost what a run of pra_recommended costs; from the results of both."""
    each = float(sft["flops"]) / max(1, int(sft["steps"]))
    return max(1, round(float(recommended["flops"]) / each)) if each else int(recommended["steps"])
