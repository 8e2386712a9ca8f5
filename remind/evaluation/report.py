"""The report of an evaluation: report.json, one self-contained HTML page, Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from remind.core.files import write_json, write_text
from remind.data.dialogue import FORMATS
from remind.evaluation import tables
from remind.evaluation.tables import Table, judge_label, percent
from remind.states.pyramid import LETTERS

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

#: Characters that embed, override or isolate a direction.
_TURNING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LONGEST_QUOTE = 1200


def write_report(
    folder: str | Path, report: dict[str, Any], scores: Sequence[Score], failed: Mapping[str, Sequence[Score]]
) -> None:
    """Write report.html, report.md and, last, report.json.

    Args:
        scores: of the reference condition; its wrong answers are shown.
        failed: scores by condition, whose failures are shown.
    """
    folder = Path(folder)
    limit = report["config"]["examples"]
    wrong, broken = examples(scores, limit), failed_examples(failed, limit)
    write_text(folder / "report.html", html(report, wrong, broken))
    write_text(folder / "report.md", markdown(report, wrong, broken))
    write_json(folder / "report.json", report)


def examples(scores: Sequence[Score], limit: int) -> list[dict[str, Any]]:
    """Wrong answers in file order, the formats by turns, with the evidence found and missed."""
    wrong = [[s for s in scores if s.accuracy == 0.0 and s.record.format == name] for name in FORMATS]
    return [_example(item) for item in _by_turns(wrong)[:limit]]


def failed_examples(scores: Mapping[str, Sequence[Score]], limit: int) -> list[dict[str, Any]]:
    """Failures in file order, the kinds by turns: condition, kind, message, what was asked and what came.

    Args:
        scores: by condition.
    """
    failed = [(name, item) for name, items in scores.items() for item in items if item.failure is not None]
    kinds = list(dict.fromkeys(item.failure for _, item in failed))
    mixed = _by_turns([[pair for pair in failed if pair[1].failure == kind] for kind in kinds])
    return [
        {
            **_example(item),
            "condition": name,
            "failure": str(item.failure) + (f": {item.why}" if item.failure == "judge" and item.why else ""),
            "message": _cut(item.generation.message),
        }
        for name, item in mixed[:limit]
    ]


def _by_turns(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for item in chain.from_iterable(zip_longest(*groups)) if item is not None]


def _example(item: Score) -> dict[str, Any]:
    record, parsed = item.record, item.parsed
    if record.visual:
        gold = [(index, f"image {index}") for index in record.images]
        shown: Sequence[object] = record.images_found
        cited = [f"image {index}" for index in sorted(parsed.images)]
    else:
        gold = [(turn, _cut(line)) for turn, line in zip(record.evidence, record.evidence_lines, strict=True)]  # type: ignore[misc]
        shown = record.evidence_found
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
        "found": [line for place, line in gold if place in shown],
        "missed": [line for place, line in gold if place not in shown],
        "cited": cited,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + " […]"


def _facts(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What was run: configuration, identity, inputs, prompts, versions."""
    model, identity = report["model"], report["identity"]
    length = f", {model['max_length']} tokens" if model["max_length"] else ""
    kind = f" ({model['kind']}{length})" if model["kind"] else ""
    rest = {key: value for key, value in identity.items() if key not in {"states", "model", *report["config"]}}
    return [
        *report["config"].items(),
        ("answering model", f"{model['name']}{kind}"),
        *rest.items(),
        ("states hash", identity["states"]),
        ("model hash", identity["model"]),
        *((f"input {name}", value) for name, value in (report["states"]["inputs"] or {}).items()),
        *((f"prompt {name}", value) for name, value in report["prompts"].items()),
        ("machine", report["machine"]),
        *((f"version of {name}", value) for name, value in report["versions"].items()),
    ]


def markdown(
    report: Mapping[str, Any], wrong: Sequence[Mapping[str, Any]] = (), broken: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The report for a pull request or a note. Text of data and models cannot become markup, nor turn direction.

    Args:
        wrong, broken: as in `html`.
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
    suffix = f" ({base})" if len(tables.conditions(report)) > 1 else ""
    own = [table._replace(title=table.title + suffix) for table in tables.measures(report)]
    for table in (*tables.comparisons(report), *tables.failures(report), *own, *tables.costs(report)):
        lines += ["", f"## {table.title}", "", *_md_table(table)]
    for title, items in (("Some wrong answers", wrong), ("Some failures", broken)):
        if items:
            lines += ["", f"## {title}", "", *(line for item in items for line in _md_example(item))]
    lines += ["", "## What was run", "", *(f"- {_md(key)}: {_md(value)}" for key, value in _facts(report)), ""]
    return "\n".join(lines)


def _md_example(item: Mapping[str, Any]) -> list[str]:
    gold = item["gold"] or [f"{o['letter']}. {o['text']}" for o in item["options"] if o["gold"]]
    lines = [f"- {_md(item['question'])} ({_md(item['id'])}, {_md(item['kind'])})"]
    if "failure" in item:
        lines.append(f"  - {_md(item['condition'])}: {_md(item['failure'])} {_md(item['message'])}".rstrip())
    lines += [f"  - gold: {_md(' / '.join(gold))}", f"  - answer: {_md(item['answer'] or item['output'])}"]
    lines += [f"  - evidence shown: {_md(line)}" for line in item["found"]]
    lines += [f"  - evidence not shown: {_md(line)}" for line in item["missed"]]
    return lines


def _md_table(table: Table) -> list[str]:
    return [
        f"| | {' | '.join(map(_md, table.heads))} |",
        f"|---|{'---:|' * len(table.heads)}",
        *(f"| {_md(row.name)} | {' | '.join(_md(cell, links=False) for cell in row.cells)} |" for row in table.rows),
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
    report: Mapping[str, Any], wrong: Sequence[Mapping[str, Any]] = (), broken: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        wrong: what `examples` gives. broken: what `failed_examples` gives.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = percent
    template = (files("remind.evaluation") / "report.html.j2").read_text(encoding="utf-8")
    parts = tables.conditions(report)
    return environment.from_string(template).render(
        report=report,
        judge=judge_label(report),
        base=tables.reference_of(report),
        parts=parts,
        first=[*tables.comparisons(report), *tables.failures(report)],
        measures={name: tables.measures(part) for name, part in parts.items()},
        costs=tables.costs(report),
        facts=_facts(report),
        wrong=wrong,
        broken=broken,
    )
