"""A map of where PRA holds and where it collapses on the synthetic world: accuracy under x0, x1 and x2 by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from experiments.proof.arms import Knobs
from experiments.proof.conditions import named
from experiments.proof.queue import run_all
from experiments.proof.store import FALL, BenchConfig, Spec, accuracy, base_spec, collapsed, open_store
from remind.alignment.config import Level
from remind.core.errors import ConfigError
from remind.core.files import write_json, write_text
from remind.evaluation.tables import markdown_table
from remind.states.pyramid import LEVELS
from sae.figures import Picture, new_figure
from sae.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Seed, Share, Workers, check_ranges

Teacher = Literal["live", "ema", "base"]
Grad = Literal["detach", "flow"]


@dataclass
class StabilityConfig:
    """Where PRA holds and where it collapses: accuracy under x0, x1 and x2 by setting, on dev."""

    model: str
    """Folder of the untrained nano model, or nano: the shipped one."""
    out: str
    """Folder of the results: runs/, results.json, table.md, stability.png. What is done is not done again."""
    stage: Literal["all", "report"] = "all"
    """report: only table and plot, of the runs there are."""
    workers: Workers = 2
    """Processes of one thread each; 0: this process alone."""
    steps: PositiveInt = 150
    """Optimiser steps of a run."""
    seeds: tuple[Seed, ...] = (201, 202)
    """Training worlds."""
    condition: str = "clean"
    """Labels of the training questions: clean, noisy-0.4, none and others, as in experiments.proof."""
    lr: tuple[NonNegativeFloat, ...] = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
    """Peak learning rates."""
    tau: tuple[PositiveFloat, ...] = (1.0, 2.0)
    """Temperatures of the distillation terms."""
    teachers: tuple[Teacher, ...] = ("live", "ema", "base")
    """live and ema have the paper's edges, x1 teaching x0 and x2 teaching x1. base can only teach x0: x1 and x2 do."""
    hard_levels: tuple[tuple[Level, ...], ...] = ((0,), (0, 1, 2))
    """Levels with a hard loss."""
    target_grad: tuple[Grad, ...] = ("detach", "flow")
    """Whether teachers get gradients; flow with live teachers alone."""
    lambda_hard: Share = 0.2
    """Share of the hard loss."""
    gamma: NonNegativeFloat = 3.0
    """Weight of every edge."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """What every run has in common."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        # from YAML they come as lists, which cannot be compared with one another
        self.hard_levels = tuple(tuple(levels) for levels in self.hard_levels)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds must be distinct, and at least one")
        named(self.condition)
        if not points(self):
            raise ConfigError("nothing to map: target_grad flow needs teacher live")


def points(cfg: StabilityConfig) -> list[Knobs]:
    """All combinations that can be trained."""
    result = []
    for teacher, grad, levels, tau, lr in product(cfg.teachers, cfg.target_grad, cfg.hard_levels, cfg.tau, cfg.lr):
        if grad == "flow" and teacher != "live":
            continue
        edges = ((0, 1), (0, 2)) if teacher == "base" else ((0, 1), (1, 2))
        result.append(Knobs(lr, cfg.lambda_hard, tau, cfg.gamma, edges, levels, teacher, grad))
    return result


def stability(cfg: StabilityConfig) -> Path:
    """Do the runs, and write table and plot; prints where they are.

    Returns:
        The folder of the results.

    Raises:
        RemindError: of the first run that failed; those that were done stay.
    """
    store = open_store(cfg.bench, cfg.model, cfg.out)
    condition = named(cfg.condition)
    runs = [(knobs, [Spec("map", condition, s, knobs, cfg.steps, "dev") for s in cfg.seeds]) for knobs in points(cfg)]
    if cfg.stage == "all":
        # one seed of all points before the next: the map is soon there in outline
        specs = [own[place] for place in range(len(cfg.seeds)) for _, own in runs]
        run_all(store, [base_spec("dev"), *specs], cfg.workers, "stability map")
    base = store.result(base_spec("dev"))
    finished = [(knobs, [store.result(spec) for spec in own if store.done(spec)]) for knobs, own in runs]
    results = {
        "weights": store.weights,
        "condition": cfg.condition,
        "steps": cfg.steps,
        "seeds": list(cfg.seeds),
        "base": {level: accuracy(base["right"][level]) for level in LEVELS},
        "rows": [_row(knobs, own, base) for knobs, own in finished if own],
    }
    write_json(store.out / "results.json", results)
    write_text(store.out / "table.md", render(results))
    plot = draw(results, store.out / "stability.png")
    print(f"results are in {store.out / 'results.json'}, {store.out / 'table.md'}, {plot}")
    return store.out


def _row(knobs: Knobs, runs: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> dict[str, Any]:
    reached = {level: [accuracy(run["right"][level]) for run in runs] for level in LEVELS}
    return {
        **asdict(knobs),
        "accuracy": {level: sum(values) / len(runs) for level, values in reached.items()},
        "worst": {level: min(values) for level, values in reached.items()},
        "runs": len(runs),
        "collapsed": sum(collapsed(run, base) for run in runs),
        "guard": sum(bool(run["guard"]) for run in runs),
        "stopped": sum(run["stopped"] is not None for run in runs),
    }


def _name(row: Mapping[str, Any]) -> str:
    levels = ",".join(map(str, row["hard_levels"]))
    return f"{row['teacher_weights']}, {row['target_grad']}, hard {levels}, τ {row['tau']:g}"


def best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The setting with the highest accuracy under x0 among those that never collapsed; None if all did."""
    held = [row for row in rows if not row["collapsed"]]
    return max(held, key=lambda row: float(row["accuracy"]["x0"])) if held else None


def render(results: Mapping[str, Any]) -> str:
    """table.md."""
    base = ", ".join(f"{level} {100 * results['base'][level]:.1f}" for level in LEVELS)
    sizes = f"{results['steps']} steps, {len(results['seeds'])} seeds"
    lines = [
        "# Stability map",
        "",
        f"Labels {results['condition']}, {sizes}, answers on dev, in %. Untrained model: {base}.",
        f"Collapsed: runs in which the guard fired, or x1 or x2 ended more than {100 * FALL:.0f} points below the "
        "untrained model.",
        "",
    ]
    heads = ["teacher", "target_grad", "hard levels", "τ", "lr", *LEVELS, "collapsed", "guard"]
    body = [
        [row["teacher_weights"], row["target_grad"], ", ".join(map(str, row["hard_levels"]))]
        + [f"{row['tau']:g}", f"{row['lr']:g}", *(f"{100 * row['accuracy'][level]:.1f}" for level in LEVELS)]
        + [f"{row[name]} of {row['runs']}" for name in ("collapsed", "guard")]
        for row in results["rows"]
    ]
    lines.append(markdown_table(heads, body))
    top = best(results["rows"])
    if top is None:
        lines += ["All settings collapsed.", ""]
    else:
        lines += [f"Best without a collapse: {_name(top)}, lr {top['lr']:g}.", ""]
    return "\n".join(lines)


def draw(results: Mapping[str, Any], path: Path) -> Path:
    """A heat map for each state: settings down, learning rates across, numbers in the cells, × where runs collapsed."""
    rows = results["rows"]
    names = list(dict.fromkeys(map(_name, rows)))
    rates = sorted({row["lr"] for row in rows})
    figure = new_figure(4.0 + 1.1 * 3 * max(2, len(rates)) * 0.75, 1.6 + 0.36 * len(names))
    panels = figure.subplots(1, len(LEVELS), sharey=True)
    image = None
    for axes, level in zip(panels, LEVELS, strict=True):
        values = [[float("nan")] * len(rates) for _ in names]
        for row in rows:
            values[names.index(_name(row))][rates.index(row["lr"])] = row["accuracy"][level]
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for row in rows:
            value, place = row["accuracy"][level], (rates.index(row["lr"]), names.index(_name(row)))
            text = f"{100 * value:.0f}" + (" ×" if row["collapsed"] else "")
            axes.text(*place, text, ha="center", va="center", fontsize=7, color="white" if value < 0.55 else "black")
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xlabel("learning rate")
        axes.set_title(f"{level} (untrained {100 * results['base'][level]:.0f} %)", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=panels, label="accuracy")
    figure.suptitle("Accuracy after training. ×: collapsed in at least one seed. A low loss is no sign of success")
    return Picture(figure).save(path)


if __name__ == "__main__":
    from remind.core.cli import main

    main(StabilityConfig, stability, __doc__)
