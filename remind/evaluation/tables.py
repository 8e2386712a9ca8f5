"""A report as tables: its rows and columns, cells as text in percent; as plain text for the terminal, and as an HTML
page that stands alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from remind.core.run_folder import flatten
from remind.data.dialogue import FORMATS
from remind.evaluation.config import CONDITIONS
from remind.llm.ledger import table as requests
from remind.states.pyramid import LETTERS
from sae.pages import page

if TYPE_CHECKING:
    from remind.evaluation.scores import Score


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
#: Of the tables by dimension and format (Tables 4 to 7); the last two are of direct questions.
_OF_A_CELL = ("accuracy", "parse_rate", "memory_recall", "bleu1", "f1")


class Row(NamedTuple):
    """A row: its name, its cells under the table's other heads, what the name means, an accuracy to draw as a bar."""

    name: str
    cells: list[str]
    note: str = ""
    accuracy: Mapping[str, Any] | None = None


class Table(NamedTuple):
    """A table: its title, the heads of the columns, that of names first, and rows."""

    title: str
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
        gains = {key: one.get("accuracy") for key, one in report["differences"].get(name, {}).items()}
        row, gain, left_out = part["overall"], gains.get("all"), sum(part["counts"]["left_out"].values())
        values = [percent(row[m], interval=m != "parse_rate") for m in shown]
        less = [percent(gain, interval=True, signed=True), "" if gain is None else str(gain["n"])]
        cells = [str(row["n"]), str(left_out), str(row["failed"]), str(row["no_verdict"])]
        overall.append(_condition(name, [*cells, *values[:1], *less, *values[1:]], row["accuracy"]))
        cells = []
        for format in formats:
            own = part["by_format"].get(format)
            cells.append(percent(own and own["accuracy"], interval=True))
            cells.append(percent(gains.get(format), interval=True, signed=True))
        by_format.append(_condition(name, cells))
    columns = ["n", "left out", "failed", "no verdict", *heads[:1], f"Acc less {base}", "n in both", *heads[1:]]
    format_columns = [head for format in formats for head in (format, f"{format} less {base}")]
    return [
        Table("Conditions side by side", ["condition", *columns], overall),
        Table("Accuracy by condition and format", ["condition", *format_columns], by_format),
    ]


def _grouped(title: str, head: str, rows: Mapping[str, Mapping[str, Any]], whole: bool) -> Table:
    """The measures that at least one row has. whole: all with interval and n; else accuracy alone with its interval."""
    shown = [name for name in HEADS if any(row[name] is not None for row in rows.values())]

    def cell(name: str, estimate: Mapping[str, Any] | None) -> str:
        if not whole:
            return percent(estimate, interval=name == "accuracy")
        # the n of a parse rate is that of the row
        if estimate is None or name == "parse_rate":
            return percent(estimate)
        return f"{percent(estimate, interval=True)} n {estimate['n']}"

    lines = [
        Row(name, [str(row["n"]), str(row["failed"]), *(cell(m, row[m]) for m in shown)], accuracy=row["accuracy"])
        for name, row in rows.items()
    ]
    return Table(title, [head, "n", "failed", *(HEADS[m] for m in shown)], lines)


def measures(part: Mapping[str, Any]) -> list[Table]:
    """All measures of a report, or of one condition in it, by format, dimension and category; then the main ones by
    dimension and format together."""
    dimensions = {name.replace("_", " "): row for name, row in part["by_dimension"].items()}
    tables = [
        _grouped("By format", "", {**part["by_format"], "all": part["overall"]}, whole=True),
        _grouped("By dimension", "", dimensions, whole=True),
        _grouped("By category", "", part["by_category"], whole=True),
        *dimensions_and_formats(part),
    ]
    return [one for one in tables if one.rows]


def dimensions_and_formats(part: Mapping[str, Any]) -> list[Table]:
    """Dimensions as rows, the main measures by format as columns (Tables 4 to 7). None without dimensions.

    The last row has the means over dimensions (Table 1).
    """
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
        for dimension, cells in {**rows, "mean over dimensions": part["macro"]}.items()
    ]
    heads = ["dimension", *(f"{format} {HEADS.get(name, name)}" for format, name in columns)]
    return [Table("By dimension and format", heads, lines)] if rows else []


def costs(report: Mapping[str, Any]) -> Table:
    """Tokens, and seconds of this sitting, by condition."""
    rows: list[Row] = []
    for name, part in report["conditions"].items():
        counts, seconds = part["counts"], part["seconds"]
        cells = [f"{counts[key]:,}" for key in ("prompt_tokens", "new_tokens")]
        cells += [f"{seconds[key]:.1f}" for key in ("model", "scoring")]
        cells += [str(part["resumed"]), f"{counts['cut_prompts']} ({counts['cut_turns']})"]
        rows.append(_condition(name, cells))
    heads = ["condition", "tokens read", "written", "s in the model", "s scoring"]
    heads += ["from earlier sittings", "prompts cut (turns)"]
    return Table("Costs", heads, rows)


def plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text; the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in [head, *rows]
    )


def table(report: Mapping[str, Any]) -> str:
    """Plain tables: of one condition by format, or of several side by side and by format; then of the one, or of the
    reference condition, by dimension and format. Percent, 95 % intervals. Last the answers without gold."""
    formats = {**report["by_format"], "all": report["overall"]}
    tables = comparisons(report) or [_grouped("By format", "format", formats, whole=False)]
    tables += dimensions_and_formats(report)
    texts = [plain(t.heads, [[row.name, *row.cells] for row in t.rows]) for t in tables]
    for key, meaning in (("failed", "counted as wrong"), ("no_verdict", "not in accuracy")):
        if number := report["overall"][key]:
            texts[0] += f"\n{key.replace('_', ' ')}, {meaning}: {number}"
    answers: dict[str, list[str]] = {}
    for name, part in report["conditions"].items():
        for one in part["unlabelled"]:
            answers.setdefault(f"{one['id']}: {one['question']}", []).append(f"  {name}: {one['answer']}")
    if answers:
        number = report["counts"]["without_gold_answer"]
        head = f"Answers to questions without a gold answer ({len(answers)} of {number}; all of them: report.html)"
        texts.append("\n".join([head, *(line for asked, given in answers.items() for line in (asked, *given))]))
    return "\n\n".join(texts)


def answers(scored: Mapping[str, Sequence[Score]]) -> list[list[tuple[str, Score]]]:
    """Every question, in file order, with what came of it under each condition."""
    rows: dict[str, list[tuple[str, Score]]] = {}
    for name, items in scored.items():
        for item in items:
            rows.setdefault(item.record.question_id, []).append((name, item))
    return list(rows.values())


def html(report: Mapping[str, Any], scored: Mapping[str, Sequence[Score]], more: str = "") -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        scored: by condition; every answer is on the page.
        more: HTML behind the tables, escaped.
    """
    judge = report["identity"]["judge"]
    run = ("config", "model", "identity", "states", "prompts", "machine", "versions")
    return page(
        "remind.evaluation",
        "report.html.j2",
        "report.css",
        title=f"Evaluation of {report['config']['model']}",
        percent=percent,
        report=report,
        # verdicts of different judges do not compare
        judge=f"{judge} (a rule, not a model)" if judge.startswith("offline") else judge,
        first=comparisons(report),
        measures={name: measures(part) for name, part in report["conditions"].items()},
        costs=costs(report),
        requests=requests(report["costs"]) if report.get("costs") else "",
        facts=flatten({key: report[key] for key in run}),
        scored=list(scored),
        answers=answers(scored),
        letters=LETTERS,
        outcomes={f"{one.outcome}-{number}" for number, items in enumerate(scored.values()) for one in items},
        more=Markup(more),
    )
