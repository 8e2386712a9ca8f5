"""Evidence ratio over the budget as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.evidence.methods import METHODS
from experiments.evidence.prepare import SCOPES
from sae.figures import Picture, new_figure

_COLOURS = ("#9a9a9a", "#c58b1b", "#4a90c2", "#2a5d84", "#b0413e", "#1f7a4d")


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per dataset and scope, with 95 % bands; PNG."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = new_figure(5.2 * len(SCOPES), 3.9 * len(datasets))
    panels = figure.subplots(len(datasets), len(SCOPES), squeeze=False, sharey=True)
    for line, dataset in zip(panels, datasets, strict=True):
        for axes, scope in zip(line, SCOPES, strict=True):
            shown = [row for row in rows if (row["dataset"], row["scope"], row["category"]) == (dataset, scope, "all")]
            for method, colour in zip(METHODS, _COLOURS, strict=True):
                points = sorted((row for row in shown if row["method"] == method), key=lambda row: row["budget"])
                budgets, ratios, low, high = ([p[key] for p in points] for key in ("budget", "ratio", "low", "high"))
                style = "-" if method in ("resonance", "fused") else "--"
                axes.plot(budgets, ratios, style, color=colour, marker="o", markersize=3.5, label=method)
                axes.fill_between(budgets, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.set_xscale("log")
            axes.set_xticks(budgets, [str(budget) for budget in budgets])
            axes.minorticks_off()
            axes.set_ylim(0, 1.02)
            axes.set_title(f"{dataset}, {scope} (n = {shown[0]['n']})", fontsize=10)
            axes.set_xlabel("marked tokens")
            axes.set_ylabel("gold evidence turns marked")
    panels[0][0].legend(fontsize=8, loc="upper left")
    Picture(figure).save(path)
