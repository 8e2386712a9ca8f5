"""Means, intervals and paired differences over questions; as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.faithfulness.measure import SCORES, Row
from remind.evaluation.statistics import Estimate, bootstrap
from remind.evaluation.tables import plain
from sae.figures import Picture, new_figure

#: What is done to the turns, and how a heading says it.
KINDS = {"removed": "turns removed", "kept": "all other turns removed", "ablated": "guidance features ablated"}
_COLOURS = {"marked": "#c44e52", "random": "#8c8c8c", "evidence": "#8172b3", "all": "#333333"}


def summarise(rows: Sequence[Row], resamples: int, seed: int) -> dict[str, Any]:
    """Estimates over questions.

    Returns:
        `logprob`: under x0. `methods[kind][chooser]`: change, and mean tokens. `paired[kind]`: change by the marked
        turns minus that by random ones; for `removed` and `ablated` below 0 means that the answer rests more on the
        marked turns, for `kept` above 0 that they carry it better. `marked_share`: of all turns' tokens.
    """

    def estimate(values: Sequence[float]) -> Estimate | None:
        return bootstrap(values, resamples, seed)

    methods: dict[str, Any] = {}
    paired: dict[str, Any] = {}
    for kind in KINDS:
        changes = [row["changes"][kind] for row in rows if kind in row["changes"]]
        for chooser in _COLOURS:
            own = [change[chooser] for change in changes if chooser in change]
            if not own:
                continue
            tokens = sum(change["tokens"] for change in own) / len(own)
            methods.setdefault(kind, {})[chooser] = {
                **{score: estimate([change[score] for change in own]) for score in SCORES},
                "tokens": tokens,
            }
        if changes:
            paired[kind] = {
                score: estimate([change["marked"][score] - change["random"][score] for change in changes])
                for score in SCORES
            }
    return {
        "logprob": {score: estimate([row["logprob"][score] for row in rows]) for score in SCORES},
        "methods": methods,
        "paired": paired,
        "marked_share": estimate([row["tokens"]["marked"] / row["tokens"]["turns"] for row in rows]),
    }


def table(result: dict[str, Any]) -> str:
    """Changes in nats: of the target per token and in all, and of what stands between the answer tags."""
    heads = ("change in log-probability", "n", "tokens", "per target token", "target", "answer")
    lines: list[tuple[str, ...]] = []
    for kind, methods in result["methods"].items():
        lines.append((KINDS[kind], "", "", "", "", ""))
        for chooser, method in methods.items():
            lines.append((f"  {chooser}", str(method["sum"]["n"]), f"{method['tokens']:.0f}", *_cells(method)))
        difference = result["paired"][kind]
        lines.append(("  marked − random", str(difference["sum"]["n"]), "", *_cells(difference)))
    return plain(heads, lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row[score]['value']:+.{digits}f} [{row[score]['low']:+.{digits}f}, {row[score]['high']:+.{digits}f}]"
        for score, digits in (("per_token", 4), ("sum", 2), ("answer", 3))
    ]


def plot(result: dict[str, Any], path: str | Path) -> None:
    """One panel for each kind of edit: mean change per target token with its 95 % interval, as a PNG."""
    kinds = list(result["methods"])
    widths = [len(result["methods"][kind]) + 1 for kind in kinds]
    figure = new_figure(1.5 + 0.75 * sum(widths), 3.6)
    axes = figure.subplots(1, len(kinds), squeeze=False, width_ratios=widths)[0]
    # an ablation leaves the words in place; beside removals its bars would not be seen
    axes[1].sharey(axes[0])
    for axis, kind in zip(axes, kinds, strict=True):
        for place, (chooser, method) in enumerate(result["methods"][kind].items()):
            change = method["per_token"]
            error = [[change["value"] - change["low"]], [change["high"] - change["value"]]]
            axis.bar(place, change["value"], yerr=error, capsize=3, color=_COLOURS[chooser])
        axis.set_xticks(range(len(result["methods"][kind])), list(result["methods"][kind]), rotation=35, ha="right")
        axis.set_title(KINDS[kind], fontsize=10)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("change in log-probability\nper target token, nats")
    figure.suptitle(f"{result['counts']['measured']} questions, {Path(result['config']['model']).name}", fontsize=9)
    Picture(figure).save(path)
