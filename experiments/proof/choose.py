"""The settings of each arm, chosen on dev before any test question is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.proof.bench import Shelf
from experiments.proof.config import ProofConfig
from experiments.proof.plan import choices
from experiments.proof.queue import run_all
from experiments.proof.runs import share
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, write_json

CHOSEN = "chosen.json"


def choose(cfg: ProofConfig, shelf: Shelf) -> Path:
    """Run every point of every arm's grid and keep the best: highest mean accuracy under x0 on dev.

    Of equals the first counts.

    Returns:
        chosen.json: the values by arm, and what each point reached.
    """
    grid = choices(cfg)
    specs = [spec for points in grid.values() for _, runs in points for spec in runs]
    results = run_all(shelf, specs, cfg.workers, "choose")
    chosen: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    for arm, points in grid.items():
        scores[arm] = []
        for values, runs in points:
            reached = [share(results[shelf.key(spec)]["right"]["x0"]) for spec in runs]
            names = [f"{spec.condition.title}, seed {spec.seed}" for spec in runs]
            row = {"values": values, "accuracy": sum(reached) / len(reached)}
            scores[arm].append({**row, "runs": dict(zip(names, reached, strict=True))})
        best = max(scores[arm], key=lambda row: row["accuracy"])
        chosen[arm] = best["values"]
    path = shelf.out / CHOSEN
    about = {"conditions": list(cfg.choose.conditions), "seeds": list(cfg.choose.seeds), "steps": cfg.steps}
    write_json(path, {"chosen": chosen, "on": "dev", **about, "weights": shelf.bench.weights, "scores": scores})
    return path


def read_chosen(cfg: ProofConfig, shelf: Shelf) -> dict[str, dict[str, Any]]:
    """The values by arm.

    Raises:
        ConfigError: nothing was chosen yet, or for another model, or not for all arms that have a grid.
    """
    path = shelf.out / CHOSEN
    grid = choices(cfg)
    if not path.exists():
        if grid:
            raise ConfigError(f"{path} is missing: run with --stage choose first")
        return {}
    values = read_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("chosen"), dict):
        raise DataError("holds no chosen settings; remove it and run with --stage choose", path)
    if values.get("weights") != shelf.bench.weights:
        raise ConfigError(f"{path} was chosen for another model: run with --stage choose again")
    if missing := sorted(grid.keys() - values["chosen"].keys()):
        raise ConfigError(f"{path} has nothing for {missing[0]}: run with --stage choose again")
    chosen: dict[str, dict[str, Any]] = values["chosen"]
    return chosen
