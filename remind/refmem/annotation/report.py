"""The merge told on a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remind.data.dialogue import FORMATS


def report(result: Mapping[str, Any]) -> str:
    """Counts, κ by dimension and format, removal rates."""
    figures, removal = result["agreement"], result["removal"]
    rows = ", ".join(f"{_cell(name)} {count}" for name, count in result["rows"].items())
    lines = [
        "# Annotation",
        "",
        f"{result['items']} items: {result['kept']} kept, {result['removed']} removed, {result['open']} open. "
        f"Annotators differ on, or leave open, {result['conflicts']}; {result['resolved']} of them resolved.",
        f"Rows: {rows}.",
        "",
        "## Fleiss' κ before discussion",
        "",
        "Over items that every annotator answered. Single choice: one subject an item, options as categories. "
        "Multi and direct: each option or candidate a subject, yes or no. The column over all formats takes every "
        "option of every item as yes or no.",
        "",
        "| dimension | all | items | " + " | ".join(FORMATS) + " |",
        "|---|---:|---:|" + "---:|" * len(FORMATS),
    ]
    for name, row in figures["dimensions"].items():
        cells = " | ".join(_kappa(row[kind]) for kind in FORMATS)
        lines.append(f"| {name.replace('_', ' ')} | {_kappa(row['all'])} | {row['all']['items']} | {cells} |")
    cells = " | ".join(_kappa(figures["formats"][kind]) for kind in FORMATS)
    lines.append(f"| all | {_kappa(figures['all'])} | {figures['all']['items']} | {cells} |")
    lines += ["", f"κ of the flag to remove: {_kappa(figures['remove'])} over {figures['remove']['items']} items."]
    if figures["all"]["left_out"]:
        lines.append(
            f"{figures['all']['left_out']} items are in no κ of answers: someone skipped or only flagged them."
        )
    if len(figures["annotators"]) < 2:
        lines.append("One annotator: there is no agreement to measure, and nobody's answer was checked.")
    lines += ["", "## Removed", "", "| | items | removed | share |", "|---|---:|---:|---:|"]
    groups = {**removal["dimensions"], **removal["formats"], "all": removal["all"]}
    for name, row in groups.items():
        if row["items"]:
            lines.append(f"| {name.replace('_', ' ')} | {row['items']} | {row['removed']} | {row['share']:.2%} |")
    return "\n".join(lines) + "\n"


def _kappa(figure: Mapping[str, Any]) -> str:
    return "–" if figure["kappa"] is None else f"{figure['kappa']:.3f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
