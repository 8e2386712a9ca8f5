"""Operations and calls per question over the length of the history, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.cost.table import length_label
from remind.core.files import atomic_path

#: By what the prompt is; Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = {"full": "#000000", "x0": "#0072B2", "x1": "#E69F00", "x2": "#009E73"}
_LINES = ("-", "--", ":", "-.")
_MARKERS = {"full": "o", "x0": "s", "x1": "^", "x2": "D"}
_SIZES = {"full": 5, "x0": 8, "x1": 4, "x2": 5}


def plot(results: dict[str, Any], path: str | Path) -> None:
    """Two panels with logarithmic axes, as a PNG; a mark where the model's own context ends."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    cfg, rows = results["config"], results["rows"]
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        kind, _, questions = name.partition("/")
        line = 1 + cfg["questions"].index(int(questions)) if questions else 0
        values = ([row["operations"] for row in own], [sum(row["calls"].values()) for row in own])
        for axis, series in zip(panels, values, strict=True):
            axis.plot(
                [row["history"] for row in own],
                series,
                _LINES[line % len(_LINES)],
                marker=_MARKERS[kind],
                # those that coincide in the right panel stay visible inside each other
                markersize=_SIZES[kind],
                markerfacecolor="none",
                color=_COLOURS[kind],
                label=own[0]["title"],
            )
    positions = results["shapes"][cfg["model"]]["positions"]
    for axis, title in zip(panels, ("operations per question (FLOPs)", "LLM calls per question"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(cfg["lengths"], [length_label(length) for length in cfg["lengths"]])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("tokens of the history")
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if cfg["lengths"][0] <= positions < cfg["lengths"][-1]:
            axis.axvline(positions, color="grey", linewidth=1, linestyle=(0, (1, 3)))
    if cfg["lengths"][0] <= positions < cfg["lengths"][-1]:
        panels[0].text(
            positions,
            0.01,
            " context of the model",
            transform=panels[0].get_xaxis_transform(),
            fontsize=8,
            color="grey",
        )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    auxiliary = cfg["auxiliary"] or "not counted"
    figure.suptitle(f"answers: {Path(cfg['model']).name}, auxiliary LLM: {Path(auxiliary).name}", fontsize=10)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
