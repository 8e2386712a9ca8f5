"""A report as tables: which rows and columns there are, numbers in percent, and plain text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remind.core.errors import ConfigError
from remind.evaluation.beside import summary
from remind.evaluation.names import CONDITIONS

#: Column heads of the measures, in the order of the tables.
HEADS = {
    "accuracy": "Acc",
    "memory_recall": "MemR",
    "memory_recall_text": "MemR text",
    "memory_recall_visual": "MemR visual",
    "bleu1": "B1",
    "f1": "F1",
    "locomo_f1": "LoCoMo F1",
    "evidence_recall": "evidence shown",
}
_COMPARED = ("accuracy", "memory_recall", "bleu1", "f1")
#: Measures of the table that puts conditions side by side.
_BESIDE = ("accuracy", "accuracy_failures_wrong", "memory_recall", "bleu1", "f1", "evidence_recall")
_BESIDE_HEADS = {**HEADS, "accuracy_failures_wrong": "Acc, failures wrong"}

Rows = list[tuple[str, dict[str, Any]]]


class Beside(NamedTuple):
    """Conditions side by side, cells as text.

    Attributes:
        head: column heads.
        rows: for each condition its name, its accuracy (or None), then the cells under the head's columns.
    """

    head: list[str]
    rows: list[tuple[str, dict[str, Any] | None, list[str]]]


def percent(estimate: Mapping[str, Any] | None, interval: bool = False) -> str:
    """`61.2`, or `61.2 [58.0, 64.3]`; an en dash where nothing took part."""
    if estimate is None:
        return "–"
    text = f"{100 * estimate['value']:.1f}"
    return f"{text} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]" if interval else text


def judge_label(report: Mapping[str, Any]) -> str:
    """The judge's name, and whether it is no model: verdicts of different judges do not compare."""
    name = str(report["identity"]["judge"])
    return f"{name} (a rule, not a model)" if name.startswith("offline") else name


def format_rows(report: Mapping[str, Any]) -> Rows:
    return [*report["by_format"].items(), ("all", report["overall"])]


def measured(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Measures that at least one row has, in the order of the tables."""
    return [name for name in HEADS if any(row[name] is not None for _, row in rows)]


def sections(report: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """The tables of a report, or of one condition in it: title and rows; those without rows left out."""
    tables: list[tuple[str, Rows]] = [
        ("By format", format_rows(report)),
        ("By dimension", [(name.replace("_", " "), row) for name, row in report["by_dimension"].items()]),
        ("By category", list(report["by_category"].items())),
    ]
    return [(title, rows) for title, rows in tables if rows]


def conditions(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The conditions of a report; one of a single condition has itself."""
    there: Mapping[str, Any] = report.get("conditions") or {str(report["config"]["level"]): report}
    return there


def reference_of(report: Mapping[str, Any]) -> str:
    """The condition that the others are compared with."""
    return str(report.get("reference", report["config"]["level"]))


def title_of(name: str) -> str:
    """What a condition shows, in words."""
    return CONDITIONS[name].title if name in CONDITIONS else ""


def side_by_side(report: Mapping[str, Any]) -> Beside | None:
    """Conditions as rows: counts, measures, and the paired difference in accuracy. None where there is only one."""
    parts, base = conditions(report), reference_of(report)
    if len(parts) < 2:
        return None
    shown = [m for m in _BESIDE if any(part["overall"][m] is not None for part in parts.values())]
    heads = [_BESIDE_HEADS[m] for m in shown]
    head = ["n", "left out", "failed", *heads[:1], f"Acc less {base}", "n in both", *heads[1:]]
    rows = []
    for name, part in parts.items():
        gain = report["differences"].get(name, {}).get("all", {}).get("accuracy")
        row = part["overall"]
        left_out = sum(part["counts"]["left_out"].values())
        values = [percent(row[m], interval=True) for m in shown]
        less = ["" if name == base else summary(gain), "" if gain is None else str(gain["n"])]
        cells = [str(row["n"]), str(left_out), str(row["failed"]), *values[:1], *less, *values[1:]]
        rows.append((name, row["accuracy"], cells))
    return Beside(head, rows)


def by_format(report: Mapping[str, Any]) -> Beside | None:
    """Conditions as rows, formats as columns: accuracy, and its paired difference. None where there is only one."""
    parts, base = conditions(report), reference_of(report)
    if len(parts) < 2:
        return None
    formats = list(dict.fromkeys(name for part in parts.values() for name in part["by_format"]))
    head = [cell for name in formats for cell in (name, f"{name} less {base}")]
    rows: list[tuple[str, dict[str, Any] | None, list[str]]] = []
    for name, part in parts.items():
        cells = []
        for format in formats:
            row = part["by_format"].get(format)
            gain = report["differences"].get(name, {}).get(format, {}).get("accuracy")
            cells += [percent(row and row["accuracy"], interval=True), "" if name == base else summary(gain)]
        rows.append((name, None, cells))
    return Beside(head, rows)


def failures(report: Mapping[str, Any]) -> Beside | None:
    """Conditions as rows, kinds of failure as columns. None where nothing failed."""
    parts = conditions(report)
    kinds = list(dict.fromkeys(kind for part in parts.values() for kind in part["counts"]["failures"]))
    if not kinds:
        return None
    rows: list[tuple[str, dict[str, Any] | None, list[str]]] = []
    for name, part in parts.items():
        found = part["counts"]["failures"]
        cells = [str(part["counts"]["questions"]), *(str(found.get(kind, 0)) for kind in kinds)]
        rows.append((name, None, cells))
    return Beside(["n", *(kind.replace("_", " ") for kind in kinds)], rows)


def costs(report: Mapping[str, Any]) -> Beside:
    """Conditions as rows: tokens read and written in all and per question, and seconds of this sitting."""
    rows: list[tuple[str, dict[str, Any] | None, list[str]]] = []
    for name, part in conditions(report).items():
        counts, seconds = part["counts"], part["seconds"]
        n = max(1, counts["questions"])
        cells = [f"{counts[key]:,}" for key in ("prompt_tokens", "new_tokens")]
        cells += [f"{counts[key] / n:,.1f}" for key in ("prompt_tokens", "new_tokens")]
        cells += [f"{seconds.get(key, 0.0):.1f}" for key in ("model", "answering", "scoring")]
        cells += [str(part.get("resumed", 0)), f"{counts.get('cut_prompts', 0)} ({counts.get('cut_turns', 0)})"]
        rows.append((name, None, cells))
    head = ["tokens read", "written", "read each", "written each", "s in the model", "s answering", "s scoring"]
    return Beside([*head, "from earlier sittings", "prompts cut (turns)"], rows)


def books(report: Mapping[str, Any]) -> Rows:
    """What the endpoints were asked: by stage, by endpoint, and in all; none where nothing was asked."""
    found = report.get("costs")
    if not found:
        return []
    return [*found["stages"].items(), *found["endpoints"].items(), ("total", found["total"])]


def plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text; the first flush left, the others flush right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )


def table(report: Mapping[str, Any]) -> str:
    """Plain tables: of one condition by format, or of several side by side and by format. Percent, 95 % intervals."""
    found = [(beside, "condition") for beside in (side_by_side(report), by_format(report)) if beside is not None]
    if found:
        return "\n\n".join(plain([first, *b.head], [[name, *cells] for name, _, cells in b.rows]) for b, first in found)
    measures = measured(format_rows(report))
    rows = [
        [name, str(row["n"]), str(row["failed"]), *(percent(row[m], interval=m == "accuracy") for m in measures)]
        for name, row in format_rows(report)
    ]
    return plain(["format", "n", "failed", *(HEADS[m] for m in measures)], rows)


def compare_rows(before: dict[str, Any], after: dict[str, Any], comparing: Sequence[str] = ("model",)) -> str:
    """One plain table of two reports by format: accuracy, MemR, BLEU-1 and F1 in percent, before and after.

    Args:
        before, after: what `evaluate` returns, or report.json holds.
        comparing: entries of the reports' identity that may differ; all others must be equal.

    Raises:
        ConfigError: the reports differ in something that is not being compared.
    """
    first, second = before["identity"], after["identity"]
    differing = sorted(
        key for key in {*first, *second} - set(comparing) if first.get(key) != second.get(key) or key not in first
    )
    if differing:
        raise ConfigError(f"the two reports cannot be compared, they differ in {', '.join(differing)}")
    head = ["format", "n", *(f"{HEADS[m]} {when}" for m in _COMPARED for when in ("before", "after"))]
    rows = []
    pairs = zip(format_rows(before), format_rows(after), strict=True)
    for (name, old), (_, new) in pairs:
        values = [percent(row[m]) for m in _COMPARED for row in (old, new)]
        rows.append([name, str(old["n"]), *values])
    lines = [plain(head, rows)]
    failed = [side["overall"]["failed"] for side in (before, after)]
    if any(failed):
        lines.append(f"failed and in no score: {failed[0]} before, {failed[1]} after")
    return "\n".join(lines)
