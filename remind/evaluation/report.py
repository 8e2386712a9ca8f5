"""The report of an evaluation as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from remind.core.run_folder import flatten
from remind.data.dialogue import FORMATS
from remind.evaluation import tables
from remind.llm.ledger import table as requests
from remind.states.pyramid import LETTERS

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

_LONGEST_QUOTE = 1200
#: Wrong answers shown, with the evidence found and missed; and as many failures.
_EXAMPLES = 12


def wrong_answers(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Wrong answers in file order, the formats by turns, with the evidence found and missed. Failures are apart."""
    wrong = [s for s in scores if s.accuracy == 0.0 and s.failure is None]
    by_turns = zip_longest(*([s for s in wrong if s.record.format == name] for name in FORMATS))
    return [_example(item) for item in chain.from_iterable(by_turns) if item is not None][:_EXAMPLES]


def failed_answers(scored: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """Failures in file order, the kinds by turns: condition, kind, message, what was asked and what came.

    Args:
        scored: by condition.
    """
    failed = [(name, item) for name, items in scored.items() for item in items if item.failure is not None]
    kinds = dict.fromkeys(item.failure for _, item in failed)
    by_turns = zip_longest(*([pair for pair in failed if pair[1].failure == kind] for kind in kinds))
    mixed = [pair for pair in chain.from_iterable(by_turns) if pair is not None][:_EXAMPLES]
    return [
        {
            **_example(item),
            "condition": name,
            "failure": ": ".join(filter(None, (item.failure, item.why))),
            "message": _cut(item.generation.message),
        }
        for name, item in mixed
    ]


def _example(item: Score) -> dict[str, Any]:
    record, parsed = item.record, item.parsed
    if record.visual:
        gold = [(index, f"image {index}") for index in record.images]
        shown: Sequence[object] = record.images_found or ()
        cited = [f"image {index}" for index in sorted(parsed.images)]
    else:
        gold = [(turn, _cut(line)) for turn, line in zip(record.evidence, record.evidence_lines, strict=True)]  # type: ignore[misc]
        shown = record.evidence_found or ()
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


def html(report: Mapping[str, Any], scored: Mapping[str, Sequence[Score]], more: str = "") -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        scored: by condition; wrong answers of the reference condition and failures of all are shown.
        more: HTML behind the tables, escaped.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = tables.percent
    template = (files("remind.evaluation") / "report.html.j2").read_text(encoding="utf-8")
    parts, judge = report["conditions"], report["identity"]["judge"]
    run = ("config", "model", "identity", "states", "prompts", "machine", "versions")
    return environment.from_string(template).render(
        report=report,
        # verdicts of different judges do not compare
        judge=f"{judge} (a rule, not a model)" if judge.startswith("offline") else judge,
        base=report["reference"],
        parts=parts,
        first=[*tables.comparisons(report), *tables.failures(report)],
        measures={name: tables.measures(part) for name, part in parts.items()},
        costs=tables.costs(report),
        requests=requests(report["costs"]) if report.get("costs") else "",
        facts=flatten({key: report[key] for key in run}),
        wrong=wrong_answers(scored.get(report["reference"], ())),
        broken=failed_answers(scored),
        more=Markup(more),
    )
