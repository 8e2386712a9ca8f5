"""The report of an evaluation: report.json, one self-contained HTML page, Markdown, plain tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from remind.dialogue import FORMATS
from remind.errors import ConfigError
from remind.io import write_json, write_text
from remind.pyramid import LETTERS

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

#: Column heads of the measures, in the order of the tables.
HEADS = {
    "accuracy": "Acc",
    "memory_recall": "MemR",
    "memory_recall_text": "MemR text",
    "memory_recall_visual": "MemR visual",
    "bleu1": "B1",
    "f1": "F1",
    "locomo_f1": "LoCoMo F1",
    "evidence_recall": "evidence in x0",
}
_COMPARED = ("accuracy", "memory_recall", "bleu1", "f1")
_LONGEST_QUOTE = 1200


def write_report(folder: str | Path, report: dict[str, Any], scores: Sequence[Score]) -> None:
    """Write report.html, report.md and, last, report.json."""
    folder = Path(folder)
    shown = examples(scores, report["config"]["examples"])
    write_text(folder / "report.html", html(report, shown))
    write_text(folder / "report.md", markdown(report))
    write_json(folder / "report.json", report)


def percent(estimate: dict[str, Any] | None, interval: bool = False) -> str:
    """`61.2`, or `61.2 [58.0, 64.3]`; an en dash where nothing took part."""
    if estimate is None:
        return "–"
    text = f"{100 * estimate['value']:.1f}"
    return f"{text} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]" if interval else text


def judge_label(report: dict[str, Any]) -> str:
    """The judge's name, and whether it is no model: verdicts of different judges do not compare."""
    name = str(report["identity"]["judge"])
    return f"{name} (a rule, not a model)" if name.startswith("offline") else name


def _rows(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [*report["by_format"].items(), ("all", report["overall"])]


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )


def measured(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Measures that at least one row has, in the order of the tables."""
    return [name for name in HEADS if any(row[name] is not None for _, row in rows)]


def table(report: dict[str, Any]) -> str:
    """One plain table of a report by format: percent, accuracy with its 95 % interval."""
    measures = measured(_rows(report))
    rows = [
        [name, str(row["n"]), str(row["failed"]), *(percent(row[m], interval=m == "accuracy") for m in measures)]
        for name, row in _rows(report)
    ]
    return _plain(["format", "n", "failed", *(HEADS[m] for m in measures)], rows)


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
    pairs = zip(_rows(before), _rows(after), strict=True)
    for (name, old), (_, new) in pairs:
        values = [percent(row[m]) for m in _COMPARED for row in (old, new)]
        rows.append([name, str(old["n"]), *values])
    lines = [_plain(head, rows)]
    failed = [side["overall"]["failed"] for side in (before, after)]
    if any(failed):
        lines.append(f"failed and in no score: {failed[0]} before, {failed[1]} after")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    """A short report for a pull request or a note."""
    counts, config = report["counts"], report["config"]
    failures = ", ".join(f"{n} {_md(name)}" for name, n in counts["failures"].items()) or "none"
    lines = [
        f"# Evaluation of {_md(config['model'])}",
        "",
        f"Split {config['split']}, answered from {config['level']}, judge {_md(judge_label(report))}. "
        f"{counts['questions']} questions, {counts['answered']} answered; failures: {failures}; "
        f"{counts['without_gold_answer']} without a gold answer, "
        f"{counts['without_gold_evidence']} without gold evidence.",
        "Percent with 95 % intervals; failures are neither right nor wrong.",
    ]
    for title, rows in sections(report):
        measures = measured(rows)
        lines += ["", f"## {title}", ""]
        lines.append(f"| | n | failed | {' | '.join(HEADS[m] for m in measures)} |")
        lines.append(f"|---|{'---:|' * (len(measures) + 2)}")
        for name, row in rows:
            cells = [percent(row[m], interval=True) for m in measures]
            lines.append(f"| {_md(name)} | {row['n']} | {row['failed']} | {' | '.join(cells)} |")
    identity = report["identity"]
    lines += ["", f"States `{identity['states'][:12]}`, model `{identity['model'][:12]}`.", ""]
    return "\n".join(lines)


def _md(text: str) -> str:
    """Text that stays text inside a Markdown table cell."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!&$])", r"\\\1", " ".join(str(text).split()))


def sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """The tables of a report: title and rows; those without rows left out."""
    tables = [
        ("By format", _rows(report)),
        ("By dimension", [(name.replace("_", " "), row) for name, row in report["by_dimension"].items()]),
        ("By category", list(report["by_category"].items())),
    ]
    return [(title, rows) for title, rows in tables if rows]


def examples(scores: Sequence[Score], limit: int) -> list[dict[str, Any]]:
    """Wrong answers in file order, the formats by turns, with the evidence found and missed."""
    wrong = [[item for item in scores if item.wrong and item.record.format == name] for name in FORMATS]
    mixed = [item for item in chain.from_iterable(zip_longest(*wrong)) if item is not None]
    return [_example(item) for item in mixed[:limit]]


def _example(item: Score) -> dict[str, Any]:
    record, parsed = item.record, item.parsed
    if record.visual:
        found = [f"image {index}" for index in record.images if index in record.images_found]
        missed = [f"image {index}" for index in record.images if index not in record.images_found]
        cited = [f"image {index}" for index in sorted(parsed.images)]
    else:
        lines = list(zip(record.evidence, record.evidence_lines, strict=True))
        found = [_cut(line) for turn_id, line in lines if turn_id in record.evidence_found]
        missed = [_cut(line) for turn_id, line in lines if turn_id not in record.evidence_found]
        cited = [_cut(line) for line in parsed.evidence]
    return {
        "id": record.question_id,
        "dialogue": record.dialogue_id,
        "kind": " · ".join(part for part in (record.format, record.dimension, record.category) if part),
        "question": record.question,
        "options": [
            {"letter": letter, "text": option, "gold": letter in record.answers, "chosen": letter in parsed.letters}
            for letter, option in zip(LETTERS, record.options, strict=False)
        ],
        "gold": [] if record.options else list(record.answers),
        "answer": _cut(parsed.answer),
        "output": _cut(item.generation.text),
        "problems": list(parsed.problems) + ([] if item.generation.finished else ["cut off"]),
        "found": found,
        "missed": missed,
        "cited": cited,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + " […]"


def html(report: dict[str, Any], shown: Sequence[dict[str, Any]]) -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = percent
    template = (files("remind.evaluation") / "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=report,
        judge=judge_label(report),
        tables=sections(report),
        examples=shown,
        heads=HEADS,
        measured=measured,
    )
