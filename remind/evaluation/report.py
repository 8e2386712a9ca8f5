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
        percent=tables.percent,
        report=report,
        # verdicts of different judges do not compare
        judge=f"{judge} (a rule, not a model)" if judge.startswith("offline") else judge,
        first=tables.comparisons(report),
        measures={name: tables.measures(part) for name, part in report["conditions"].items()},
        costs=tables.costs(report),
        requests=requests(report["costs"]) if report.get("costs") else "",
        facts=flatten({key: report[key] for key in run}),
        scored=list(scored),
        answers=answers(scored),
        letters=LETTERS,
        outcomes={f"{one.outcome}-{number}" for number, items in enumerate(scored.values()) for one in items},
        more=Markup(more),
    )
