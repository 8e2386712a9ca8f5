"""A report as tables: which rows and columns there are, cells as text in percent, and plain text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from remind.data.dialogue import FORMATS
from remind.evaluation.config import CONDITIONS

#: Column heads of the measures, in the order of the tables.
HEADS = {
    "accuracy": "Acc",
    "parse_rate": "parsed",
    "memory_recall": "MemR",
    "memory_recall_text": "MemR text",
    "memory_recall_visual": "MemR visual",
    "bleu1": "B1",
    "f1": "F1",
    "locomo_f1": "LoCoMo F1",
    "evidence_recall": "evidence shown",
}
#: Measures of the table that puts conditions side by side.
_SIDE_BY_SIDE = ("accuracy", "parse_rate", "memory_recall", "bleu1", "f1", "evidence_recall")
#: Of the tables by dimension and format (Tables 4 to 7) and of before and after; the last two are of direct questions.
_OF_A_CELL = ("accuracy", "parse_rate", "memory_recall", "bleu1", "f1")


class Row(NamedTuple):
    """A row: its name, its cells under the table's heads, what the name means, and an accuracy to draw as a bar."""

    name: str
    cells: list[str]
    note: str = ""
    accuracy: Mapping[str, Any] | None = None


class Table(NamedTuple):
    """A table: its title, the head of the column of names, the other heads, and rows."""

    title: str
    first: str
    heads: list[str]
    rows: list[Row]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown that ends with a line end, so that a blank line follows where lines are joined."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in [heads, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:], ""])


def percent(estimate: Mapping[str, Any] | None, interval: bool = False, signed: bool = False) -> str:
    """`61.2`, `61.2 [58.0, 64.3]`, or signed `+4.0 [-1.2, +9.1]`; an en dash where nothing took part."""
    if estimate is None:
        return "–"
    sign = "+" if signed else ""
    text = f"{100 * estimate['value']:{sign}.1f}"
    if not interval or estimate["low"] is None:
        return text
    return f"{text} [{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


def judge_label(report: Mapping[str, Any]) -> str:
    """The judge's name, and whether it is no model: verdicts of different judges do not compare."""
    name = str(report["identity"]["judge"])
    return f"{name} (a rule, not a model)" if name.startswith("offline") else name


def _condition(name: str, cells: list[str], accuracy: Mapping[str, Any] | None = None) -> Row:
    return Row(name, cells, CONDITIONS[name].title if name in CONDITIONS else "", accuracy)


def comparisons(report: Mapping[str, Any]) -> list[Table]:
    """Conditions as rows, beside the paired difference in accuracy: all measures, then accuracy by format.

    None where there is only one condition.
    """
    parts, base = report["conditions"], report["reference"]
    if len(parts) < 2:
        return []
    shown = [m for m in _SIDE_BY_SIDE if any(part["overall"][m] is not None for part in parts.values())]
    heads = [HEADS[m] for m in shown]
    formats = list(dict.fromkeys(name for part in parts.values() for name in part["by_format"]))
    overall, by_format = [], []
    for name, part in parts.items():
        row, gains = part["overall"], report["differences"].get(name, {})
        gain = gains.get("all", {}).get("accuracy")
        left_out = sum(part["counts"]["left_out"].values())
        values = [percent(row[m], interval=m != "parse_rate") for m in shown]
        less = [_gain(gain, name == base), "" if gain is None else str(gain["n"])]
        cells = [str(row["n"]), str(left_out), str(row["failed"]), str(row["no_verdict"])]
        cells += [*values[:1], *less, *values[1:]]
        overall.append(_condition(name, cells, row["accuracy"]))
        cells = []
        for format in formats:
            own = part["by_format"].get(format)
            cells.append(percent(own and own["accuracy"], interval=True))
            cells.append(_gain(gains.get(format, {}).get("accuracy"), name == base))
        by_format.append(_condition(name, cells))
    columns = ["n", "left out", "failed", "no verdict", *heads[:1], f"Acc less {base}", "n in both", *heads[1:]]
    format_columns = [head for format in formats for head in (format, f"{format} less {base}")]
    return [
        Table("Conditions side by side", "condition", columns, overall),
        Table("Accuracy by condition and format", "condition", format_columns, by_format),
    ]


def _gain(difference: Mapping[str, Any] | None, is_base: bool) -> str:
    return "" if is_base else percent(difference, interval=True, signed=True)


def measures(part: Mapping[str, Any]) -> list[Table]:
    """All measures of a report, or of one condition in it, by format, dimension and category; then the main ones by
    dimension and format together."""
    groups = {
        "By format": {**part["by_format"], "all": part["overall"]},
        "By dimension": {name.replace("_", " "): row for name, row in part["by_dimension"].items()},
        "By category": part["by_category"],
    }
    tables = []
    for title, rows in groups.items():
        shown = measured(rows)
        lines = []
        for name, row in rows.items():
            values = [_measure(m, row) for m in shown]
            lines.append(Row(name, [str(row["n"]), str(row["failed"]), *values], accuracy=row["accuracy"]))
        if lines:
            tables.append(Table(title, "", ["n", "failed", *(HEADS[m] for m in shown)], lines))
    return tables + dimensions_and_formats(part)


def _measure(name: str, row: Mapping[str, Any]) -> str:
    """A value with interval and n; of the parse rate the value alone, whose n is that of the row."""
    if row[name] is None or name == "parse_rate":
        return percent(row[name])
    return f"{percent(row[name], interval=True)} n {row[name]['n']}"


def dimensions_and_formats(part: Mapping[str, Any]) -> list[Table]:
    """Dimensions as rows, the main measures by format as columns (Tables 4 to 7). None without dimensions."""
    rows: Mapping[str, Mapping[str, Any]] = part["by_dimension_and_format"]
    columns = [
        (format, name)
        for format in FORMATS
        if any(format in cells for cells in rows.values())
        for name in ("n", *_OF_A_CELL[: None if format == "direct" else -2])
    ]

    def cell(row: Mapping[str, Any] | None, name: str) -> str:
        return "–" if row is None else str(row["n"]) if name == "n" else percent(row[name])

    lines = [
        Row(dimension.replace("_", " "), [cell(cells.get(format), name) for format, name in columns])
        for dimension, cells in rows.items()
    ]
    heads = [f"{format} {HEADS.get(name, name)}" for format, name in columns]
    return [Table("By dimension and format", "dimension", heads, lines)] if lines else []


def measured(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Measures that at least one row has, in the order of the tables."""
    return [name for name in HEADS if any(row[name] is not None for row in rows.values())]


def failures(report: Mapping[str, Any]) -> list[Table]:
    """Conditions as rows, kinds of failure as columns. None where nothing failed."""
    parts = {name: part["counts"] for name, part in report["conditions"].items()}
    kinds = list(dict.fromkeys(kind for counts in parts.values() for kind in counts["failures"]))
    rows = [
        _condition(name, [str(counts["questions"]), *(str(counts["failures"].get(kind, 0)) for kind in kinds)])
        for name, counts in parts.items()
    ]
    heads = ["n", *(kind.replace("_", " ") for kind in kinds)]
    return [Table("Failures by kind", "condition", heads, rows)] if kinds else []


def costs(report: Mapping[str, Any]) -> list[Table]:
    """Tokens and seconds of this sitting by condition; what endpoints were asked, by stage, by endpoint and in all."""
    rows: list[Row] = []
    for name, part in report["conditions"].items():
        counts, seconds = part["counts"], part["seconds"]
        tokens = [counts[key] for key in ("prompt_tokens", "new_tokens")]
        cells = [f"{number:,}" for number in tokens]
        cells += [f"{number / max(1, counts['questions']):,.1f}" for number in tokens]
        cells += [f"{seconds[key]:.1f}" for key in ("model", "answering", "scoring")]
        cells += [str(part["resumed"]), f"{counts['cut_prompts']} ({counts['cut_turns']})"]
        rows.append(_condition(name, cells))
    heads = ["tokens read", "written", "read each", "written each", "s in the model", "s answering", "s scoring"]
    tables = [Table("Costs", "condition", [*heads, "from earlier sittings", "prompts cut (turns)"], rows)]
    if ledger := report.get("costs"):
        entries = [*ledger["stages"].items(), *ledger["endpoints"].items(), ("total", ledger["total"])]
        heads = ["requests", "cached", "failed", "calls", "tokens read", "written", "uncounted replies"]
        heads += ["USD", "of it in this run", "s, median", "s, 95 %"]
        rows = [Row(name, _requests(entry)) for name, entry in entries]
        tables.append(Table("Endpoints", "endpoint requests", heads, rows))
    return tables


def _requests(entry: Mapping[str, Any]) -> list[str]:
    numbers = [entry["requests"], entry["cached"], sum(entry["failures"].values())]
    numbers += [entry[key] for key in ("calls", "prompt_tokens", "completion_tokens", "unknown_usage")]
    dollars = [f"{entry['cost_usd']:.4f}", f"{entry['now']['cost_usd']:.4f}"]
    seconds = ["–" if value is None else f"{value:.2f}" for value in (entry["seconds"][key] for key in ("p50", "p95"))]
    return [*map(str, numbers), *dollars, *seconds]


def plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text; the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in [head, *rows]
    )


def table(report: Mapping[str, Any]) -> str:
    """Plain tables: of one condition by format, or of several side by side and by format; then of the one, or of the
    reference condition, by dimension and format. Percent, 95 % intervals."""
    tables = comparisons(report)
    if not tables:
        groups = {**report["by_format"], "all": report["overall"]}
        shown = measured(groups)
        rows = [
            Row(name, [str(row["n"]), str(row["failed"]), *(percent(row[m], interval=m == "accuracy") for m in shown)])
            for name, row in groups.items()
        ]
        tables = [Table("By format", "format", ["n", "failed", *(HEADS[m] for m in shown)], rows)]
    tables += dimensions_and_formats(report)
    texts = [plain([t.first, *t.heads], [[row.name, *row.cells] for row in t.rows]) for t in tables]
    if note := _failure_note([report["overall"]]):
        texts[0] += f"\n{note}"
    return "\n\n".join(texts)


def _failure_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many questions failed and how many have no verdict, and what that means for accuracy; "" if none."""
    notes = (("failed", "counted as wrong"), ("no_verdict", "not in accuracy"))
    parts = [
        f"{key.replace('_', ' ')}, {meaning}: {', '.join(str(row[key]) for row in rows)}"
        for key, meaning in notes
        if any(row[key] for row in rows)
    ]
    return "; ".join(parts)


def compare_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """One plain table of two reports of the same questions by format: `_OF_A_CELL` in percent."""
    shown = _OF_A_CELL
    old, new = ({**report["by_format"], "all": report["overall"]} for report in (before, after))
    rows = [
        [name, str(row["n"]), *(percent(side[name][m]) for m in shown for side in (old, new))]
        for name, row in old.items()
    ]
    lines = plain(["format", "n", *(f"{HEADS[m]} {when}" for m in shown for when in ("before", "after"))], rows)
    note = _failure_note([before["overall"], after["overall"]])
    return f"{lines}\n{note} (before, after)" if note else lines
