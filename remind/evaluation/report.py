"""The report of an evaluation as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from remind.core.run_folder import flatten
from remind.evaluation import tables
from remind.llm.ledger import table as requests
from remind.states.pyramid import LETTERS
from sae.pages import page

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

_LONGEST_QUOTE = 1200


def answers(scored: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """Every question, in file order, with what came of it under each condition: outcome, answer, evidence, output.

    Args:
        scored: by condition.
    """
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, items) in enumerate(scored.items()):
        for item in items:
            record, parsed = item.record, item.parsed
            row = rows.setdefault(record.question_id, _question(item))
            for option in row["options"]:
                option["chosen"] += [name] * (option["letter"] in parsed.letters)
            if record.visual:
                gold = [(index, f"image {index}") for index in record.images]
                shown: Sequence[object] = record.images_found or ()
                cited = [f"image {index}" for index in sorted(parsed.images)]
            else:
                gold = [(turn, _cut(line)) for turn, line in zip(record.evidence, record.evidence_lines, strict=True)]  # type: ignore[misc]
                shown = record.evidence_found or ()
                cited = [_cut(line) for line in parsed.evidence]
            outcome = {None: "unscored", 0.0: "wrong"}.get(item.accuracy, "right")
            outcome = "failed" if item.failure is not None else outcome
            row["outcomes"].append(f"{outcome}-{number}")
            row["given"].append(
                {
                    "condition": name,
                    "outcome": outcome,
                    "failure": ": ".join(filter(None, (item.failure, item.why))),
                    "message": _cut(item.generation.message),
                    "answer": _cut(parsed.answer),
                    "output": _cut(item.generation.text),
                    "problems": list(parsed.problems) + ([] if item.generation.finished else ["cut off"]),
                    "found": [line for place, line in gold if place in shown],
                    "missed": [line for place, line in gold if place not in shown],
                    "cited": cited,
                }
            )
    return list(rows.values())


def _question(item: Score) -> dict[str, Any]:
    record = item.record
    return {
        "id": record.question_id,
        "dialogue": record.dialogue_id,
        "kind": " · ".join(part for part in (record.format, record.dimension, record.category) if part),
        "question": record.question,
        "options": [
            {"letter": letter, "text": option, "gold": letter in record.answers, "chosen": []}
            for letter, option in zip(LETTERS, record.options, strict=False)
        ],
        "gold": [] if record.options else list(record.answers),
        "outcomes": [],
        "given": [],
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + " […]"


def html(report: Mapping[str, Any], scored: Mapping[str, Sequence[Score]], more: str = "") -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        scored: by condition; every answer is on the page.
        more: HTML behind the tables, escaped.
    """
    judge = report["identity"]["judge"]
    run = ("config", "model", "identity", "states", "prompts", "machine", "versions")
    every = answers(scored)
    return page(
        "remind.evaluation",
        "report.html.j2",
        "report.css",
        title=f"Evaluation of {report['config']['model']}",
        percent=tables.percent,
        report=report,
        # verdicts of different judges do not compare
        judge=f"{judge} (a rule, not a model)" if judge.startswith("offline") else judge,
        first=[*tables.comparisons(report), *tables.failures(report)],
        measures={name: tables.measures(part) for name, part in report["conditions"].items()},
        costs=tables.costs(report),
        requests=requests(report["costs"]) if report.get("costs") else "",
        facts=flatten({key: report[key] for key in run}),
        scored=list(scored),
        answers=every,
        outcomes={outcome for row in every for outcome in row["outcomes"]},
        more=Markup(more),
    )
