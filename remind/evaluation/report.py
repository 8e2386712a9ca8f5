"""The report of an evaluation: report.json, one self-contained HTML page, Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from remind.core.files import write_json, write_text
from remind.evaluation import tables
from remind.evaluation.examples import examples, failed_examples
from remind.evaluation.tables import HEADS, compare_rows, judge_label, measured, percent, sections, table

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

#: Characters that embed, override or isolate a direction.
_TURNING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

__all__ = [
    "HEADS",
    "compare_rows",
    "examples",
    "failed_examples",
    "html",
    "judge_label",
    "markdown",
    "measured",
    "percent",
    "sections",
    "table",
    "write_report",
]


def write_report(
    folder: str | Path,
    report: dict[str, Any],
    scores: Sequence[Score],
    failed: Mapping[str, Sequence[Score]] | None = None,
) -> None:
    """Write report.html, report.md and, last, report.json.

    Args:
        scores: of the reference condition; its wrong answers are shown.
        failed: scores by condition, whose failures are shown; None: those of `scores`.
    """
    folder = Path(folder)
    limit = report["config"]["examples"]
    shown = examples(scores, limit)
    broken = failed_examples(failed or {tables.reference_of(report): scores}, limit)
    write_text(folder / "report.html", html(report, shown, broken))
    write_text(folder / "report.md", markdown(report, shown, broken))
    write_json(folder / "report.json", report)


def markdown(
    report: Mapping[str, Any], shown: Sequence[Mapping[str, Any]] = (), broken: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The report for a pull request or a note. Text of data and models cannot become markup, nor turn direction.

    Args:
        shown, broken: as in `html`.
    """
    counts, config = report["counts"], report["config"]
    failures = ", ".join(f"{n} {_md(name)}" for name, n in counts["failures"].items()) or "none"
    base = tables.reference_of(report)
    lines = [
        f"# Evaluation of {_md(config['model'])}",
        "",
        f"Split {config['split']}, answered from {_md(base)}, judge {_md(judge_label(report))}. "
        f"{counts['questions']} questions, {counts['answered']} answered; failures: {failures}; "
        f"{counts['without_gold_answer']} without a gold answer, "
        f"{counts['without_gold_evidence']} without gold evidence.",
        "Percent with 95 % intervals; failures are neither right nor wrong, and told apart.",
    ]
    besides = (
        ("Conditions side by side", tables.side_by_side(report)),
        ("Accuracy by condition and format", tables.by_format(report)),
        ("Failures", tables.failures(report)),
    )
    for title, beside in besides:
        if beside is not None:
            lines += ["", f"## {title}", "", *_rows(beside.head, [(name, cells) for name, _, cells in beside.rows])]
    suffix = f" ({base})" if len(tables.conditions(report)) > 1 else ""
    for title, rows in sections(report):
        measures = measured(rows)
        head = ["n", "failed", *(HEADS[m] for m in measures)]
        cells = [
            (name, [str(row["n"]), str(row["failed"]), *(percent(row[m], interval=True) for m in measures)])
            for name, row in rows
        ]
        lines += ["", f"## {title}{suffix}", "", *_rows(head, cells)]
    beside = tables.costs(report)
    lines += ["", "## Costs", "", *_rows(beside.head, [(name, cells) for name, _, cells in beside.rows])]
    if books := report.get("costs"):
        total = books["total"]
        asked = f"{total['requests']} requests, {total['cached']} cached, {total['calls']} calls"
        tokens = f"{total['prompt_tokens']} tokens read, {total['completion_tokens']} written"
        lines += ["", f"Endpoints: {asked}, {tokens}, USD {total['cost_usd']:.4f}."]
    for title, items in (("Some wrong answers", shown), ("Some failures", broken)):
        if items:
            lines += ["", f"## {title}", "", *(line for item in items for line in _example(item))]
    identity = report["identity"]
    lines += ["", "## What was run", ""]
    lines += [f"States `{identity['states'][:12]}`, model `{_md(identity['model'][:12])}`.", ""]
    lines += [f"- {_md(key)}: {_md(value)}" for key, value in report["config"].items()]
    lines += [f"- input {_md(name)}: {_md(value)}" for name, value in (report["states"]["inputs"] or {}).items()]
    lines += [f"- prompt {_md(name)}: {value}" for name, value in report["prompts"].items()]
    lines += [f"- version of {_md(name)}: {_md(value)}" for name, value in report["versions"].items()]
    lines += [f"- machine: {_md(report['machine'])}", ""]
    return "\n".join(lines)


def _example(item: Mapping[str, Any]) -> list[str]:
    gold = item["gold"] or [f"{o['letter']}. {o['text']}" for o in item["options"] if o["gold"]]
    said = item["answer"] or item["output"]
    lines = [f"- {_md(item['question'])} ({_md(item['id'])}, {_md(item['kind'])})"]
    if "failure" in item:
        lines.append(f"  - {_md(item['condition'])}: {_md(item['failure'])} {_md(item['message'])}".rstrip())
    lines += [f"  - gold: {_md(' / '.join(gold))}", f"  - answer: {_md(said)}"]
    lines += [f"  - evidence shown: {_md(line)}" for line in item["found"]]
    lines += [f"  - evidence not shown: {_md(line)}" for line in item["missed"]]
    return lines


def _rows(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    return [
        f"| | {' | '.join(_md(cell) for cell in head)} |",
        f"|---|{'---:|' * len(head)}",
        *(f"| {_md(name)} | {' | '.join(_md(cell, links=False) for cell in cells)} |" for name, cells in rows),
    ]


def _md(text: Any, links: bool = True) -> str:
    """Text that stays text in a Markdown line or table cell; characters that turn its direction are spelled out.

    Args:
        links: whether brackets could make a link; those of our own intervals cannot.
    """
    special = r"([\\`*_{}\[\]<>|#~!&$])" if links else r"([\\`*_{}<>|#~!&$])"
    escaped = re.sub(special, r"\\\1", " ".join(str(text).split()))
    return _TURNING.sub(lambda match: f"(U+{ord(match.group()):04X})", escaped)


def html(
    report: Mapping[str, Any], shown: Sequence[Mapping[str, Any]], broken: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        shown: what `examples` gives. broken: what `failed_examples` gives.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = percent
    template = (files("remind.evaluation") / "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=report,
        judge=judge_label(report),
        base=tables.reference_of(report),
        parts=tables.conditions(report),
        side_by_side=tables.side_by_side(report),
        by_format=tables.by_format(report),
        failures=tables.failures(report),
        costs=tables.costs(report),
        books=tables.books(report),
        title_of=tables.title_of,
        sections=sections,
        examples=shown,
        broken=broken,
        heads=HEADS,
        measured=measured,
    )
