"""The proof from start to end: choose settings, run, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.proof.bench import Shelf, Spec, base_spec
from experiments.proof.choose import choose, read_chosen
from experiments.proof.conditions import Condition
from experiments.proof.config import ProofConfig
from experiments.proof.plan import Chosen, cells, equal_steps, final_runs, spec_of
from experiments.proof.queue import read_result, run_all
from experiments.proof.table import Cell, report

Placed = tuple[str, Condition, int, Spec]


def prove(cfg: ProofConfig) -> Path:
    """Do the stages asked for; prints where the results are.

    Returns:
        The folder of the results.

    Raises:
        ConfigError: settings that cannot be run, or a stage whose forerunner is missing.
        RemindError: of the first run that failed; those that were done stay.
    """
    out = Path(cfg.out).resolve()
    shelf = Shelf(cfg.bench.bench(cfg.model), out)
    if cfg.stage in ("choose", "all"):
        print(f"settings are in {choose(cfg, shelf)}")
    if cfg.stage in ("run", "report", "all"):
        chosen = read_chosen(cfg, shelf)
        if cfg.stage != "report":
            run(cfg, shelf, chosen)
        found = collect(cfg, shelf, chosen)
        paths = report(cfg, shelf, chosen, found)
        print(f"results are in {', '.join(str(path) for path in paths)}")
    return out


def run(cfg: ProofConfig, shelf: Shelf, chosen: Chosen) -> None:
    """All final runs; those of sft_flops last, when it is known what pra_recommended costs."""
    placed = list(final_runs(cfg, chosen))
    bases = [base_spec("test"), base_spec("dev")]
    run_all(shelf, [*bases, *(spec for *_, spec in placed)], cfg.workers, "run")
    late = [spec for *_, spec in _equal_flops(cfg, shelf, chosen)]
    if late:
        run_all(shelf, late, cfg.workers, "run at equal FLOPs")


def _equal_flops(cfg: ProofConfig, shelf: Shelf, chosen: Chosen) -> list[Placed]:
    """The runs of sft_flops whose forerunners are done."""
    placed: list[Placed] = []
    for arm, condition in cells(cfg):
        if arm != "sft_flops":
            continue
        for seed in cfg.seeds:
            pair = [_result(shelf, spec_of(cfg, chosen, one, condition, seed)) for one in ("sft", "pra_recommended")]
            if pair[0] is not None and pair[1] is not None:
                steps = equal_steps(pair[0], pair[1])
                placed.append((arm, condition, seed, spec_of(cfg, chosen, arm, condition, seed, steps)))
    return placed


def _result(shelf: Shelf, spec: Spec) -> dict[str, Any] | None:
    path = shelf.path(spec)
    return read_result(path) if path.exists() else None


def collect(cfg: ProofConfig, shelf: Shelf, chosen: Chosen) -> dict[Cell, dict[int, dict[str, Any]]]:
    """Results by arm and condition, by seed; of runs that are not done there are none."""
    found: dict[Cell, dict[int, dict[str, Any]]] = {}
    missing = 0
    for arm, condition, seed, spec in [*final_runs(cfg, chosen), *_equal_flops(cfg, shelf, chosen)]:
        result = _result(shelf, spec)
        if result is None:
            missing += 1
        else:
            found.setdefault((arm, condition.title), {})[seed] = result
    if missing:
        print(f"{missing} runs are not done yet; the tables are of the others", file=sys.stderr)
    return found
