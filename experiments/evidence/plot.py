"""Evidence ratio over the budget as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.evidence.methods import METHODS
from remind.core.files import atomic_path

_COLOURS = {
    "random": "#9a9a9a",
    "bm25": "#c58b1b",
    "dense": "#4a90c2",
    "bm25+dense": "#2a5d84",
    "resonance": "#b0413e",
    "fused": "#1f7a4d",
}
_SCOPES = {"full": "full history", "retrieved": "within the retrieved segments"}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per dataset and scope, with 95 % bands; PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = [row for row in rows if row["category"] == "all"]
    datasets = list(dict.fromkeys(row["dataset"] for row in whole))
    scopes = [scope for scope in _SCOPES if any(row["scope"] == scope for row in whole)]
    figure = Figure(figsize=(5.2 * len(scopes), 3.9 * len(datasets)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(datasets), len(scopes), squeeze=False, sharey=True)
    for line, dataset in zip(axes, datasets, strict=True):
        for axis, scope in zip(line, scopes, strict=True):
            here = [row for row in whole if row["dataset"] == dataset and row["scope"] == scope]
            for method in METHODS:
                points = sorted((row for row in here if row["method"] == method), key=lambda row: row["budget"])
                budgets = [row["budget"] for row in points]
                axis.plot(
                    budgets,
                    [row["ratio"] for row in points],
                    color=_COLOURS[method],
                    marker="o",
                    markersize=3.5,
                    linewidth=2.4 if method in ("resonance", "fused") else 1.3,
                    linestyle="-" if method in ("resonance", "fused") else "--",
                    label=method,
                )
                axis.fill_between(
                    budgets,
                    [row["low"] for row in points],
                    [row["high"] for row in points],
                    color=_COLOURS[method],
                    alpha=0.12,
                    linewidth=0,
                )
            ticks = sorted({row["budget"] for row in here})
            axis.set_xscale("log")
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.25)
            count = here[0]["n"]
            axis.set_title(f"{dataset}, {_SCOPES[scope]} (n = {count})", fontsize=10)
            axis.set_xlabel("marked tokens")
            axis.set_ylabel("gold evidence turns marked")
    axes[0][0].legend(fontsize=8, loc="upper left")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=140)
