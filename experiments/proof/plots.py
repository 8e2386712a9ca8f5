"""Pictures of the results: accuracy by condition and arm, and the trajectory of a run (Figure 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.proof.arms import ARMS
from remind.viewing.plots import plot_trajectory as draw_trajectory
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = ("o", "s", "^", "v", "D", "P", "*", "X")


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


def _dots(axes: Axes, rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any], title: str) -> None:
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
            fmt=SHAPES[style],
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


def plot_trajectory(traced: Mapping[tuple[str, str], Mapping[str, Any]], path: Path) -> Path:
    """For every traced run: shares of the loss terms, divergences, and accuracy under the three states, over steps."""
    runs = {}
    for (arm, title), run in traced.items():
        steps, accuracy = run["trace"]["steps"], run["trace"]["accuracy"]
        rows = [*(("train", row) for row in steps), *(("accuracy", row) for row in accuracy)]
        runs[f"{ARMS[arm].title}, {title}"] = [{**row, "kind": kind} for kind, row in rows]
    return draw_trajectory(runs, ("shares", "jsd", "accuracy")).save(path)
