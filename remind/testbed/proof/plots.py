"""Pictures of the results: accuracy by condition and arm, and the trajectory of a run (Figure 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.io import atomic_path
from remind.testbed.proof.arms import ARMS, TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which the colour-blind can tell apart; shapes differ besides.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#000000", "#F0E442")
SHAPES = ("o", "s", "^", "v", "D", "P", "*", "X")
LEVEL_COLOURS = {"x0": COLOURS[0], "x1": COLOURS[4], "x2": COLOURS[2]}


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    return path


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
    return save(figure, path)


def _dots(axes: Axes, rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any], title: str) -> None:
    names = list(dict.fromkeys(row["title"] for row in rows))
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        shift = 0.7 * ((number + 0.5) / len(arms) - 0.5)
        values = [row["accuracy"]["x0"] for row in own]
        style = ARMS.index(arm) % len(COLOURS)
        axes.errorbar(
            [one["value"] for one in values],
            [names.index(row["title"]) + shift for row in own],
            xerr=[[one["value"] - one["low"] for one in values], [one["high"] - one["value"] for one in values]],
            fmt=SHAPES[style],
            color=COLOURS[style - 1],
            markersize=5,
            capsize=2,
            label=TITLES[arm],
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
    figure = new_figure(12, 3.2 * len(traced) + 0.6)
    figure.suptitle("Training trajectories. A low divergence (JSD) is not success: see the accuracy beside it")
    grid = figure.subplots(len(traced), 3, squeeze=False)
    for line, ((arm, title), run) in zip(grid, traced.items(), strict=True):
        _shares(line[0], run["trace"]["steps"])
        _divergences(line[1], run["trace"]["steps"])
        _accuracies(line[2], run["trace"]["accuracy"])
        line[0].set_title(f"{TITLES.get(arm, arm)}, {title}", loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("optimiser step")
    return save(figure, path)


def _names(rows: Sequence[Mapping[str, Any]], start: str) -> list[str]:
    return sorted({name for row in rows for name in row if name.startswith(start)})


def _shares(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = _names(rows, "share_")
    steps = [row["step"] for row in rows]
    labels = {"share_hard": "hard loss"}
    labels |= {f"share_dist{s}{t}": f"x{t} → x{s}" for s in range(3) for t in range(3)}
    if names:
        values = [[row.get(name, 0.0) for row in rows] for name in names]
        axes.stackplot(steps, values, labels=[labels.get(name, name) for name in names], colors=COLOURS, alpha=0.8)
        axes.legend(loc="lower right", fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the loss")


def _divergences(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = _names(rows, "jsd")
    for name, colour, line in zip(names, COLOURS, ("-", "--", ":"), strict=False):
        values = [row.get(name, float("nan")) for row in rows]
        label = f"x{name[-2]} and x{name[-1]}"
        axes.plot([row["step"] for row in rows], values, line, color=colour, label=label)
    if names:
        axes.legend(loc="upper right", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("JSD (nats)")


def _accuracies(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for level, marker in (("x0", "o"), ("x1", "s"), ("x2", "^")):
        values = [row[level] for row in rows]
        axes.plot([row["step"] for row in rows], values, marker=marker, color=LEVEL_COLOURS[level], label=level)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("accuracy")
    axes.legend(loc="lower right", fontsize=8)
