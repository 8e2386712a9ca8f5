"""Rows, paired differences, table and plot of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.evidence.data import DialogueQuestions
from experiments.evidence.methods import BASELINES, METHODS
from experiments.evidence.prepare import SCOPES
from remind.evaluation.statistics import cluster_bootstrap, interval
from sae.figures import Picture, new_figure

_RESAMPLES = 2000
_COLOURS = ("#9a9a9a", "#c58b1b", "#4a90c2", "#2a5d84", "#b0413e", "#1f7a4d")
Ratios = Mapping[tuple[str, str], Sequence[np.ndarray]]


def _estimate(values: np.ndarray) -> dict[str, Any]:
    low, high = interval(cluster_bootstrap(values, None, _RESAMPLES))
    return {"ratio": float(values.mean()), "low": low, "high": high, "n": len(values)}


class Table:
    """Ratios of all questions side by side.

    Args:
        asked: the dialogues. ratios: (method, scope) → for each dialogue [Q, budgets].
    """

    def __init__(self, asked: Sequence[DialogueQuestions], ratios: Ratios, budgets: Sequence[int]) -> None:
        self.budgets = list(budgets)
        self.values = {key: np.concatenate(list(found)) for key, found in ratios.items()}
        sizes = [len(one.questions) for one in asked]
        self.dataset = np.repeat([one.dataset for one in asked], sizes)
        self.dialogue = np.repeat(np.arange(len(asked)), sizes)
        self.category = np.array([name for one in asked for name in one.categories])
        self.datasets = list(dict.fromkeys(one.dataset for one in asked))

    def rows(self, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
        """A row per dataset, category ("all" last), method, scope and budget, with 95 % intervals over questions."""
        found = []
        for dataset in self.datasets:
            here = self.dataset == dataset
            for category in [*sorted(set(self.category[here])), "all"]:
                chosen = here if category == "all" else here & (self.category == category)
                for (method, scope), values in self.values.items():
                    if method in methods:
                        cell = {"dataset": dataset, "category": category, "method": method, "scope": scope}
                        found += [
                            {**cell, "budget": budget, **_estimate(values[chosen, b])}
                            for b, budget in enumerate(self.budgets)
                        ]
        return found

    def differences(self, method: str, others: Sequence[str], scope: str) -> list[dict[str, Any]]:
        """`method` less the best of `others` at each budget, paired by question, with both kinds of interval.

        The best is the one with the highest mean ratio there. Besides every dataset, "both" is the mean over datasets.
        """
        found = []
        for b, budget in enumerate(self.budgets):
            drawn: list[tuple[float, np.ndarray, np.ndarray]] = []
            for dataset in self.datasets:
                here = self.dataset == dataset
                means = {other: float(self.values[other, scope][here, b].mean()) for other in others}
                best = max(means, key=lambda other: means[other])
                gain = (self.values[method, scope] - self.values[best, scope])[here, b]
                seed = len(drawn)
                questions = cluster_bootstrap(gain, None, _RESAMPLES, seed)
                dialogues = cluster_bootstrap(gain, self.dialogue[here], _RESAMPLES, seed)
                drawn.append((float(gain.mean()), questions, dialogues))
                cell = {"method": method, "scope": scope, "budget": budget}
                about = {"dataset": dataset, **cell, "baseline": best, "n": int(here.sum())}
                found.append(about | _difference(drawn[-1:]))
            if len(drawn) > 1:
                about = {"dataset": "both", **cell, "baseline": "best of each", "n": len(self.dataset)}
                found.append(about | _difference(drawn))
        return found

    def text(self, scope: str, methods: Sequence[str]) -> str:
        """Means by method and budget, the datasets one below the other."""
        lines = []
        for dataset in self.datasets:
            here = self.dataset == dataset
            lines.append(f"{dataset}, {scope}: {here.sum()} questions".ljust(42) + _cells(self.budgets, "d"))
            for method in methods:
                if (method, scope) in self.values:
                    means = self.values[method, scope][here].mean(0)
                    lines.append(f"  {method:<40}" + _cells(means, ".3f"))
        return "\n".join(lines)


def _difference(drawn: Sequence[tuple[float, np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Mean over datasets, with intervals; drawn: mean, and resampled means by question and by dialogue, of each."""
    low, high = interval(np.mean([questions for _, questions, _ in drawn], axis=0))
    clustered_low, clustered_high = interval(np.mean([clusters for _, _, clusters in drawn], axis=0))
    return {
        "difference": float(np.mean([mean for mean, _, _ in drawn])),
        "low": low,
        "high": high,
        "clustered_low": clustered_low,
        "clustered_high": clustered_high,
    }


def _cells(values: Any, form: str) -> str:
    return "".join(f"{value:>8{form}}" for value in values)


def difference_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """The paired differences as text."""
    return "\n".join(
        f"  {row['dataset']:<10}{row['scope']:<10}{row['budget']:>6}  {row['method']} − {row['baseline']}: "
        f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}], "
        f"by dialogue [{row['clustered_low']:+.3f}, {row['clustered_high']:+.3f}]"
        for row in rows
    )


def all_differences(table: Table) -> list[dict[str, Any]]:
    """fused and resonance against the best baseline, in both scopes."""
    return [
        row
        for scope in SCOPES
        for method in ("fused", "resonance")
        for row in table.differences(method, BASELINES, scope)
    ]


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
