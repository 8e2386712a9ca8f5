"""The results of the runs: results.json, table.md and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.proof.arms import ARMS, Condition, named
from experiments.proof.config import ProofConfig
from experiments.proof.states import evidence_in_marks, split_records
from experiments.proof.statistics import Array, estimate, share_of, to_array
from experiments.proof.store import FALL, RunStore, base_spec, collapsed
from remind.core.files import write_json, write_text
from remind.evaluation.statistics import Estimate
from remind.evaluation.tables import markdown_table, percent
from remind.states.pyramid import LEVELS
from remind.testbed.built import Marks
from sae.figures import COLOURS, Picture, new_figure

#: Chosen values by arm.
Chosen = Mapping[str, Mapping[str, Any]]
#: Arm and title of the condition.
Cell = tuple[str, str]
#: By seed.
Runs = Mapping[int, Mapping[str, Any]]
Results = Mapping[Cell, Runs]


def report(
    cfg: ProofConfig, store: RunStore, chosen: Chosen, scores: Mapping[str, Any], results: Results
) -> list[Path]:
    """Write what the finished runs show.

    Returns:
        Paths of results.json, table.md and the plots.

    Raises:
        DataError: the untrained model has not been measured yet.
    """
    marks = cfg.marks[0] if cfg.marks else None
    base = store.result(base_spec("test", marks))
    questions = split_records(store, "test", *store.config.dialogues("test"), marks)
    comparison = Comparison(base, [record.dialogue_id for record in questions], cfg.resamples, marks)
    rows = [
        comparison.row(results, arm, condition)
        | {"condition": condition.name, "wrong_summaries": condition.wrong, "null": condition.null}
        | {"marks": condition.marks}
        for arm, condition in cfg.cells
        if (arm, condition.title) in results
    ]
    values = {
        "weights": store.weights,
        "seeds": list(cfg.seeds),
        "questions": len(questions),
        "steps": cfg.steps,
        "chosen": chosen,
        "scores": scores,
        "base": {level: comparison.accuracy([base], level) for level in LEVELS},
        "untrained": {name: comparison.ladder(store.result(base_spec("test", name))) for name in cfg.marks},
        "evidence": {name: evidence_in_marks(store, name) for name in cfg.marks},
        "rows": rows,
    }
    paths = [store.out / "results.json", store.out / "table.md"]
    write_json(paths[0], values)
    write_text(paths[1], render(values))
    paths.append(plot_accuracy(values, store.out / "accuracy.png"))
    return paths


class Comparison:
    """Compares runs that answered the same questions.

    Args:
        base: the result of the untrained model.
        dialogues: of the questions, in order.
        marks: of built states, that others are compared with; None: states are made from the known evidence.
    """

    def __init__(
        self, base: Mapping[str, Any], dialogues: Sequence[str], resamples: int, marks: Marks | None = None
    ) -> None:
        self.base, self.dialogues, self.resamples, self.marks = base, list(dialogues), resamples, marks

    def _estimate(self, values: Array) -> Estimate:
        return estimate(values, self.dialogues[: values.shape[1]], self.resamples)

    def accuracy(self, runs: Iterable[Mapping[str, Any]], level: str) -> Estimate:
        """Accuracy under a level."""
        return self._estimate(to_array([run["right"][level] for run in runs]))

    def ladder(self, run: Mapping[str, Any]) -> dict[str, Estimate]:
        """Accuracy of the untrained model under x0, x1 and x2, and the paired differences x1 − x0 and x2 − x1."""
        x0, x1, x2 = (to_array([run["right"][level]]) for level in LEVELS)
        values = {"x0": x0, "x1": x1, "x2": x2, "x1 - x0": x1 - x0, "x2 - x1": x2 - x1}
        return {name: self._estimate(value) for name, value in values.items()}

    def row(self, results: Results, arm: str, condition: Condition) -> dict[str, Any]:
        """The figures of an arm under a condition."""
        title = condition.title
        runs = results[arm, title]
        values = _answers(runs)
        lower, upper = (to_array([self.base["right"][level]]) for level in ("x0", "x2"))
        against: dict[str, Any] = {"base": self._estimate(values - lower)}
        for rival, where in self._rivals(results, condition).items():
            both = sorted(runs.keys() & results[rival, where].keys())
            if (rival, where) != (arm, title) and both:
                difference = _answers(runs, both) - _answers(results[rival, where], both)
                best = not condition.some_labelled
                note = {"rival": rival, "learned_under": where, "best_of_scarce": best, "seeds": both}
                against[rival] = {**self._estimate(difference), **note}
        reference = replace(condition, marks=self.marks).title
        if reference != title and (arm, reference) in results:
            both = sorted(runs.keys() & results[arm, reference].keys())
            against["marks"] = self._estimate(_answers(runs, both) - _answers(results[arm, reference], both))
        return {
            "arm": arm,
            "title": title,
            "seeds": sorted(runs),
            "accuracy": {level: self.accuracy(runs.values(), level) for level in LEVELS},
            "against": against,
            "closed": share_of(values - lower, upper - lower, self.dialogues, self.resamples),
            "steps": sorted({run["steps"] for run in runs.values()}),
            "flops": sum(run["flops"] for run in runs.values()) / len(runs),
            "seconds": sum(run["seconds"]["all"] for run in runs.values()) / len(runs),
            "collapsed": sorted(seed for seed, run in runs.items() if collapsed(run, self.base)),
        }

    def _rivals(self, results: Results, condition: Condition) -> dict[str, str]:
        """The arms to compare with, and under which condition; without labels the best that labels alone reach."""
        arms = ("sft", "sft_flops")
        if condition.some_labelled:
            title = replace(named(condition.name), marks=self.marks).title
            return {arm: title for arm in arms if (arm, title) in results}
        scarce = [
            (arm, title)
            for arm, title in results
            if arm in arms and title.startswith("scarce") and "-pool" not in title
        ]
        # the best of several on test itself: that favours the rival, never us
        best = max(scarce, key=lambda cell: float(_answers(results[cell]).mean()), default=None)
        return {} if best is None else {best[0]: best[1]}


def _answers(runs: Runs, seeds: Sequence[int] | None = None) -> Array:
    """[seeds, questions] under x0."""
    return to_array([runs[seed]["right"]["x0"] for seed in (sorted(runs) if seeds is None else seeds)])


def render(results: Mapping[str, Any]) -> str:
    """The text of table.md."""
    base = ", ".join(f"{level} {percent(results['base'][level], interval=True)}" for level in LEVELS)
    seeds = f"{len(results['seeds'])} seeds, {results['questions']} test questions, {results['steps']} steps"
    rows = [row for row in results["rows"] if row["null"] is None]
    nulls = [row for row in results["rows"] if row["null"] is not None]
    built = [
        "## Untrained, by marks",
        "Accuracy in %, paired differences in points; shares of the evidence that stand in x0 and in the marks, and of "
        "x0's turns that are marked.",
        _marks_table(results),
    ]
    parts = [
        "# Arms on the synthetic world",
        f"Accuracy under x0 in %, {seeds}. Brackets: 95 % intervals over seeds and test dialogues together.",
        f"Untrained model: {base}.",
        *(built if results["untrained"] else []),
        "## Accuracy",
        _accuracy_table(rows),
        "## Paired differences",
        "In points, on the same questions. Without labels the rival is the best that SFT on scarce labels reaches. "
        "Gap: share of the way from x0 to x2 of the untrained model.",
        _difference_table(rows),
    ]
    if nulls:
        parts += ["## Null controls of the recommended PRA", _difference_table(nulls)]
    collapses = [
        f"- {ARMS[row['arm']].title}, {row['title']}: seeds {', '.join(map(str, row['collapsed']))}"
        for row in results["rows"]
        if row["collapsed"]
    ]
    parts.append("## Collapses")
    if collapses:
        parts += [f"Guard fired, or x1 or x2 more than {FALL:.0%} below the untrained model:", "\n".join(collapses)]
    else:
        parts.append("None in any run.")
    chosen = [
        f"- {ARMS[arm].title}: {', '.join(f'{name} {value}' for name, value in values.items())}"
        for arm, values in results["chosen"].items()
    ]
    if chosen:
        parts += ["## Settings chosen on dev", "\n".join(chosen)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    cells = {(row["arm"], row["title"]): percent(row["accuracy"]["x0"], interval=True) for row in rows}
    titles = dict.fromkeys(row["title"] for row in rows)
    lines = [[title, *(cells.get((arm, title), "") for arm in arms)] for title in titles]
    return markdown_table(["condition", *(ARMS[arm].title for arm in arms)], lines)


def _difference_table(rows: Sequence[Mapping[str, Any]]) -> str:
    rivals = {"sft": "− SFT, equal steps", "sft_flops": "− SFT, equal FLOPs", "base": "− untrained"}
    if any("marks" in row["against"] for row in rows):
        rivals["marks"] = "− first marks"
    lines = []
    for row in rows:
        differences = [_points(row["against"].get(rival)) for rival in rivals]
        closed = "" if row["closed"] is None else percent(row["closed"], interval=True)
        steps = "–".join(map(str, dict.fromkeys((row["steps"][0], row["steps"][-1]))))
        reached = percent(row["accuracy"]["x0"], interval=True)
        flops = f"{row['flops'] / 1e12:.3g}"
        lines.append([row["title"], ARMS[row["arm"]].title, reached, *differences, closed, steps, flops])
    head = ["condition", "arm", "accuracy", *rivals.values(), "gap closed", "steps", "TFLOP"]
    return markdown_table(head, lines)


def _marks_table(results: Mapping[str, Any]) -> str:
    lines = []
    for name, ladder in results["untrained"].items():
        evidence = results["evidence"][name]
        shares = [f"{100 * evidence[key]:.1f}" for key in ("x0", "marked", "turns")]
        accuracies = [percent(ladder[level], interval=True) for level in LEVELS]
        lines.append([name, *accuracies, _points(ladder["x1 - x0"]), _points(ladder["x2 - x1"]), *shares])
    head = ["marks", *LEVELS, "x1 − x0", "x2 − x1", "evidence in x0", "evidence in marks", "turns marked"]
    return markdown_table(head, lines)


def _points(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    note = f" ({estimate['learned_under']})" if estimate.get("best_of_scarce") else ""
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{note}"


# pictures

_SHAPES = ("o", "s", "^", "v", "D", "P", "*", "X")


def plot_accuracy(results: Mapping[str, Any], path: Path) -> Path:
    """Accuracy under x0 with intervals; one panel for each share of wrong summaries, and one for null controls."""
    rows = results["rows"]
    shares = sorted({row["wrong_summaries"] for row in rows})
    groups: list[tuple[str, list[Any]]] = []
    for wrong in shares:
        some = [row for row in rows if row["wrong_summaries"] == wrong and row["null"] is None]
        groups.append(("right summaries" if not wrong else f"{wrong:.0%} of the summaries wrong", some))
    groups.append(("null controls", [row for row in rows if row["null"] is not None]))
    groups = [(title, some) for title, some in groups if some]
    heights = [1 + len({row["title"] for row in some}) for _, some in groups]
    figure = new_figure(9, max(3.0, 0.55 * sum(heights)))
    panels = figure.subplots(max(1, len(groups)), 1, squeeze=False, sharex=True, height_ratios=heights or [1])[:, 0]
    for axes, (title, some) in zip(panels, groups, strict=False):
        _dots(axes, some, results["base"], title)
    panels[-1].set_xlabel("accuracy under x0 on test questions (95 % interval)")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return Picture(figure).save(path)


def _dots(axes: Any, rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any], title: str) -> None:
    names = list(dict.fromkeys(row["title"] for row in rows))
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    order = list(ARMS)
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        shift = 0.7 * ((number + 0.5) / len(arms) - 0.5)
        values = [row["accuracy"]["x0"] for row in own]
        style = order.index(arm) % len(COLOURS)
        axes.errorbar(
            [one["value"] for one in values],
            [names.index(row["title"]) + shift for row in own],
            xerr=[[one["value"] - one["low"] for one in values], [one["high"] - one["value"] for one in values]],
            fmt=_SHAPES[style],
            color=COLOURS[style - 1],
            markersize=5,
            capsize=2,
            label=ARMS[arm].title,
        )
    for level, line in (("x0", ":"), ("x1", "-."), ("x2", "--")):
        axes.axvline(base[level]["value"], color="grey", linestyle=line, linewidth=1, label=f"untrained, {level}")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
