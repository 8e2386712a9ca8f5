"""What the runs come to: results.json, table.md and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.proof.arms import ARMS, TITLES
from experiments.proof.bench import Shelf, base_spec
from experiments.proof.conditions import split_records
from experiments.proof.config import ProofConfig
from experiments.proof.plan import Chosen, cells
from experiments.proof.queue import read_result
from experiments.proof.runs import share
from experiments.proof.statistics import Array, Resamples, marks
from remind.core.files import write_json, write_text
from remind.evaluation.intervals import Estimate
from remind.states.pyramid import LEVELS

#: Arm and title of the condition.
Cell = tuple[str, str]
Found = Mapping[Cell, Mapping[int, Mapping[str, Any]]]
#: Accuracy under x1 or x2 by which a run may stay below the untrained model; more is a collapse.
FALL = 0.2


def report(cfg: ProofConfig, shelf: Shelf, chosen: Chosen, found: Found) -> list[Path]:
    """Write the results of the runs there are.

    Returns:
        Paths of results.json, table.md and the plots.

    Raises:
        DataError: the untrained model has not been measured yet.
    """
    from experiments.proof.plots import plot_accuracy, plot_trajectory

    base = read_result(shelf.path(base_spec("test")))
    number, seed = shelf.bench.dialogues("test")
    asked = split_records(shelf.bench.world, shelf.bench.ladder, "test", number, seed)
    judge = Judge(base, [record.dialogue_id for record in asked], cfg.resamples)
    rows = [
        judge.row(found, arm, condition.title, condition.name, condition.some_labelled)
        | {"condition": condition.name, "wrong_summaries": condition.wrong, "null": condition.null}
        for arm, condition in cells(cfg)
        if (arm, condition.title) in found
    ]
    results = {
        "weights": shelf.bench.weights,
        "seeds": list(cfg.seeds),
        "questions": len(asked),
        "steps": cfg.steps,
        "chosen": chosen,
        "base": {level: judge.level([base], level) for level in LEVELS},
        "rows": rows,
    }
    paths = [shelf.out / "results.json", shelf.out / "table.md"]
    write_json(paths[0], results)
    write_text(paths[1], render(results))
    paths.append(plot_accuracy(results, shelf.out / "accuracy.png"))
    traced = {cell: run for cell, runs in found.items() for run in runs.values() if run["trace"]["accuracy"]}
    if traced:
        paths.append(plot_trajectory(traced, shelf.out / "trajectory.png"))
    return paths


def collapsed(run: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the guard fired, or answers under x1 or x2 got worse by more than `FALL` than the untrained model's."""
    if run["guard"] or run["stopped"]:
        return True
    return any(
        share(base["right"][level][: len(run["right"][level])]) - FALL > share(run["right"][level])
        for level in LEVELS[1:]
    )


class Judge:
    """Compares runs that answered the same questions.

    Args:
        base: the result of the untrained model.
        dialogues: of the questions, in order.
    """

    def __init__(self, base: Mapping[str, Any], dialogues: Sequence[str], resamples: int) -> None:
        self.base, self.dialogues, self.resamples = base, list(dialogues), resamples
        self._draws: dict[tuple[int, int], Resamples] = {}

    def draws(self, seeds: int, questions: int) -> Resamples:
        key = (seeds, questions)
        if key not in self._draws:
            self._draws[key] = Resamples(seeds, self.dialogues[:questions], self.resamples)
        return self._draws[key]

    def level(self, runs: Iterable[Mapping[str, Any]], level: str) -> Estimate:
        """Accuracy under a level."""
        values = marks([run["right"][level] for run in runs])
        return self.draws(*values.shape).estimate(values)

    def row(self, found: Found, arm: str, title: str, name: str, labelled: bool) -> dict[str, Any]:
        """All that is said of an arm under a condition."""
        runs = found[arm, title]
        values = _answers(runs)
        lower, upper = (marks([self.base["right"][level]]) for level in ("x0", "x2"))
        draws = self.draws(*values.shape)
        against: dict[str, Any] = {"base": draws.estimate(values - lower)}
        for other, where in self._rivals(found, name, labelled).items():
            if (other, where) != (arm, title):
                note = {"rival": other, "learned_under": where, "best_of_scarce": not labelled}
                against[other] = self._difference(runs, found[other, where], note)
        return {
            "arm": arm,
            "title": title,
            "seeds": sorted(runs),
            "accuracy": {level: self.level(runs.values(), level) for level in LEVELS},
            "against": {other: estimate for other, estimate in against.items() if estimate is not None},
            "closed": draws.share(values - lower, upper - lower),
            "steps": sorted({run["steps"] for run in runs.values()}),
            "flops": sum(run["flops"] for run in runs.values()) / len(runs),
            "seconds": sum(run["seconds"]["all"] for run in runs.values()) / len(runs),
            "collapsed": sorted(seed for seed, run in runs.items() if collapsed(run, self.base)),
        }

    def _rivals(self, found: Found, name: str, labelled: bool) -> dict[str, str]:
        """What an arm is compared with, and under which condition; without labels the best that labels alone reach."""
        arms = ("sft", "sft_flops")
        if labelled:
            return {arm: name for arm in arms if (arm, name) in found}
        scarce = [
            cell for cell in found if cell[0] in arms and cell[1].startswith("scarce") and not cell[1].endswith("-pool")
        ]
        if not scarce:
            return {}
        # the best of several on test itself: that favours the rival, never us
        best = max(scarce, key=lambda cell: float(_answers(found[cell]).mean()))
        return {best[0]: best[1]}

    def _difference(
        self, runs: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]], note: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Paired over the seeds that both have."""
        both = sorted(runs.keys() & others.keys())
        if not both:
            return None
        values = _answers({seed: runs[seed] for seed in both}) - _answers({seed: others[seed] for seed in both})
        return {**self.draws(*values.shape).estimate(values), **note, "seeds": both}


def _answers(runs: Mapping[int, Mapping[str, Any]]) -> Array:
    return marks([runs[seed]["right"]["x0"] for seed in sorted(runs)])


# as text


def render(results: Mapping[str, Any]) -> str:
    """table.md."""
    rows, base = results["rows"], results["base"]
    ladder = ", ".join(f"{level} {_percent(base[level])}" for level in LEVELS)
    seeds = f"{len(results['seeds'])} seeds, {results['questions']} test questions, {results['steps']} steps"
    parts = [
        "# Arms on the synthetic world",
        f"Accuracy under x0 in %, {seeds}. Brackets: 95 % intervals over seeds and test dialogues together.",
        f"Untrained model: {ladder}.",
        "## Accuracy",
        _accuracy_table([row for row in rows if row["null"] is None]),
        "## Paired differences",
        "In points, on the same questions. Without labels the rival is the best that SFT on scarce labels reaches. "
        "Gap: share of the way from x0 to x2 of the untrained model.",
        _difference_table([row for row in rows if row["null"] is None]),
    ]
    if nulls := [row for row in rows if row["null"] is not None]:
        parts += ["## Null controls of the recommended PRA", _difference_table(nulls)]
    if fallen := [row for row in rows if row["collapsed"]]:
        lines = [
            f"- {TITLES[row['arm']]}, {row['title']}: seeds {', '.join(map(str, row['collapsed']))}" for row in fallen
        ]
        what = f"Guard fired, or x1 or x2 more than {FALL:.0%} below the untrained model:"
        parts += ["## Collapses", what, "\n".join(lines)]
    else:
        parts += ["## Collapses", "None in any run."]
    lines = [
        f"- {TITLES[arm]}: {', '.join(f'{k} {v}' for k, v in values.items())}"
        for arm, values in results["chosen"].items()
    ]
    if lines:
        parts += ["## Settings chosen on dev", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    known = {(row["arm"], row["title"]): row for row in rows}
    lines = [f"| condition | {' | '.join(TITLES[arm] for arm in arms)} |", f"|---|{'---|' * len(arms)}"]
    for title in dict.fromkeys(row["title"] for row in rows):
        found = [known.get((arm, title)) for arm in arms]
        cells = ["" if row is None else _percent(row["accuracy"]["x0"]) for row in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _difference_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| condition | arm | accuracy | − SFT, equal steps | − SFT, equal FLOPs | − untrained | gap closed | steps "
        "| TFLOP |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        against = row["against"]
        differences = [_points(against.get(other)) for other in ("sft", "sft_flops", "base")]
        closed = "" if row["closed"] is None else _percent(row["closed"])
        steps = "–".join(map(str, dict.fromkeys((row["steps"][0], row["steps"][-1]))))
        cells = [row["title"], TITLES[row["arm"]], _percent(row["accuracy"]["x0"]), *differences, closed, steps]
        lines.append(f"| {' | '.join(cells)} | {row['flops'] / 1e12:.3g} |")
    return "\n".join(lines)


def _percent(estimate: Mapping[str, Any]) -> str:
    return f"{100 * estimate['value']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def _points(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    note = f" ({estimate['learned_under']})" if estimate.get("best_of_scarce") else ""
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{note}"
