"""Rows, paired differences and the table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.evidence.data import DialogueQuestions
from experiments.evidence.methods import BASELINES, METHODS
from experiments.evidence.prepare import SCOPES
from remind.evaluation.intervals import cluster_bootstrap, interval

_RESAMPLES = 2000
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
                        found += [
                            {
                                "dataset": dataset,
                                "category": category,
                                "method": method,
                                "scope": scope,
                                "budget": budget,
                                **_estimate(values[chosen, b]),
                            }
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
                found.append(self._difference(dataset, method, best, scope, budget, drawn[-1:], int(here.sum())))
            if len(drawn) > 1:
                found.append(self._difference("both", method, "best of each", scope, budget, drawn, len(self.dataset)))
        return found

    @staticmethod
    def _difference(
        dataset: str,
        method: str,
        baseline: str,
        scope: str,
        budget: int,
        drawn: Sequence[tuple[float, np.ndarray, np.ndarray]],
        n: int,
    ) -> dict[str, Any]:
        low, high = interval(np.mean([questions for _, questions, _ in drawn], axis=0))
        clustered_low, clustered_high = interval(np.mean([clusters for _, _, clusters in drawn], axis=0))
        return {
            "dataset": dataset,
            "method": method,
            "baseline": baseline,
            "scope": scope,
            "budget": budget,
            "difference": float(np.mean([mean for mean, _, _ in drawn])),
            "low": low,
            "high": high,
            "clustered_low": clustered_low,
            "clustered_high": clustered_high,
            "n": n,
        }

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
