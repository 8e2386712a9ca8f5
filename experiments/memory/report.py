"""Rows of the experiment on the reranker, its learning curve, table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.memory.candidates import BUDGET, Ranked
from remind.evaluation.statistics import bootstrap, paired_bootstrap
from sae.figures import COLOURS, Picture, new_figure


class Rows:
    """The table: paired differences in recall.

    Args:
        resamples: of the dialogues.
    """

    def __init__(self, resamples: int) -> None:
        self.resamples = resamples
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        dataset: str,
        questions: Sequence[Ranked],
        names: tuple[str, str],
        values: tuple[np.ndarray, np.ndarray],
        least: float | None = None,
        above: float | None = None,
        null: bool = False,
    ) -> None:
        """A row: second less first.

        Args:
            names: of what is compared. values: of both what `evaluate` gives [3, Q].
            least: what the difference must reach. above: what the low end of its interval must exceed.
            null: whether the interval must include 0.
        """
        (first, second), clusters = values, [question.dialogue for question in questions]
        difference = paired_bootstrap(first[0].tolist(), second[0].tolist(), clusters, self.resamples)
        within = paired_bootstrap(first[2].tolist(), second[2].tolist(), clusters, self.resamples)
        assert difference is not None
        low, high = (
            bound if bound is not None else difference["value"] for bound in (difference["low"], difference["high"])
        )
        met = [difference["value"] >= least] if least is not None else []
        met += [low > above] if above is not None else []
        met += [low <= 0 <= high] if null else []
        self.rows.append(
            {
                "dataset": dataset,
                "of": names[1],
                "minus": names[0],
                **difference,
                "tokens": [float(first[1].mean()), float(second[1].mean())],
                "within_budget": {"tokens": BUDGET, **(within or {})},
                "demanded": {"least": least, "low_above": above, "includes_0": null or None},
                "reached": all(met) if met else None,
            }
        )


def curve_rows(
    questions: Sequence[Ranked],
    points: Sequence[int],
    found: Mapping[str, np.ndarray],
    references: Mapping[str, np.ndarray],
    resamples: int,
) -> list[dict[str, Any]]:
    """Recall after each number of updates.

    Args:
        found: by measure, what `evaluate` gives [points, 3, Q]. references: of what learns nothing [3, Q].

    Returns:
        A row for each point: `recall`, its interval, recall of samples and with BM25, of the references, `tokens`, and
        `change`: from the point before, with its interval.
    """
    clusters = [question.dialogue for question in questions]
    rows = []
    for place, updates in enumerate(points):
        values, before = found["learned"][place], found["learned"][max(0, place - 1)]
        estimate = bootstrap(values[0].tolist(), resamples, clusters=clusters)
        change = paired_bootstrap(before[0].tolist(), values[0].tolist(), clusters, resamples)
        assert estimate is not None
        assert change is not None
        rows.append(
            {
                "updates": updates,
                "recall": estimate["value"],
                "low": estimate["low"],
                "high": estimate["high"],
                "tokens": float(values[1].mean()),
                "change": [change["value"], change["low"], change["high"]],
                **{name: float(series[place, 0].mean()) for name, series in found.items() if name != "learned"},
                **{name: float(series[0].mean()) for name, series in references.items()},
            }
        )
    return rows


def _difference(row: Mapping[str, Any]) -> str:
    between = "" if row["low"] is None else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
    return f"{row['value']:+.3f}{between}"


def table(rows: Sequence[Mapping[str, Any]], most: int) -> str:
    """The rows as text."""
    heads = (
        "dataset",
        "of",
        "minus",
        f"recall@{most}",
        f"tokens@{most}",
        "difference",
        f"at most {BUDGET} tokens",
        "demanded",
        "",
    )
    lines = [heads]
    for row in rows:
        demanded = row["demanded"]
        words = [f">= {demanded['least']:.3g}"] if demanded["least"] is not None else []
        words += [f"low > {demanded['low_above']:g}"] if demanded["low_above"] is not None else []
        words += ["includes 0"] if demanded["includes_0"] else []
        lines.append(
            (
                row["dataset"],
                row["of"],
                row["minus"],
                f"{row['first']:.3f} -> {row['second']:.3f}",
                f"{row['tokens'][0]:.0f} -> {row['tokens'][1]:.0f}",
                _difference(row),
                f"{row['within_budget']['second']:.3f}, {_difference(row['within_budget'])}",
                ", ".join(words),
                {True: "reached", False: "not reached", None: ""}[row["reached"]],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """The learning curve with its 95 % band; PNG."""
    rows = result["curve"]
    updates = [row["updates"] for row in rows]
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    axes.plot(updates, [row["recall"] for row in rows], color=COLOURS[0], marker="o", markersize=3.5, label="learned")
    axes.fill_between(
        updates, [row["low"] for row in rows], [row["high"] for row in rows], color=COLOURS[0], alpha=0.12
    )
    series = [("with lexical", "learned + BM25", "-"), ("sampled", "learned, sampled", "-")]
    series += [("dense", "dense", "--"), ("fixed", "fixed: z(dense) + z(BM25)", "--")]
    for colour, (name, label, style) in zip(COLOURS[2:], series, strict=False):
        axes.plot(updates, [row[name] for row in rows], style, color=colour, linewidth=1.3, label=label)
    axes.set_xlabel(f"updates of {result['config']['reranker']['batch']}")
    axes.set_ylabel(f"evidence recall@{result['config']['reranker']['top_m']}, held-out dialogues")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    Picture(figure).save(path)
