"""Time, memory and recall over the length of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = {"cue": ("Eq. 1", COLOURS[0], "o"), "hybrid": ("hybrid", COLOURS[5], "s")}


def plot_curve(rows: Sequence[Mapping[str, float]]) -> Picture:
    """Three panels over tokens: milliseconds per question, megabytes, evidence recall.

    Args:
        rows: as `retrieval_curve` returns them.
    """
    figure = new_figure(11, 3.2)
    times, sizes, recall = figure.subplots(1, 3)
    tokens = [row["tokens"] for row in rows]
    for method, (name, colour, shape) in _LINES.items():
        for key, line, label in (("ms", "-", f"{name}, segments"), ("x0_ms", "--", f"{name}, x0")):
            times.plot(tokens, [row[f"{method}_{key}"] for row in rows], line, marker=shape, color=colour, label=label)
        times.fill_between(
            tokens, [r[f"{method}_ms"] for r in rows], [r[f"{method}_p95_ms"] for r in rows], color=colour, alpha=0.15
        )
        recall.plot(tokens, [row[f"{method}_recall"] for row in rows], marker=shape, color=colour, label=name)
    times.set_ylim(bottom=0)
    sizes.plot(tokens, [row["disk_mb"] for row in rows], marker="o", color=COLOURS[2], label="index on disk")
    grown = [row["rss_mb"] - row["rss_before_mb"] for row in rows]
    sizes.plot(tokens, grown, marker="^", color=COLOURS[3], label="memory the index adds")
    recall.set_ylim(0, 1.02)
    for axes, label in ((times, "ms per question, median (band: to p95)"), (sizes, "MB"), (recall, "evidence recall")):
        _finish(axes, label)
    return Picture(figure)


def _finish(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("tokens of the history")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    # above the axes, where it hides nothing
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
