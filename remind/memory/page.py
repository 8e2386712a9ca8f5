"""What a page shows of memory systems: tables, a plot, questions side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from remind.core.files import write_text
from remind.evaluation.compare import Rows
from remind.evaluation.personalisation import BUCKETS, LABELS
from remind.memory.systems import COLUMNS, SYSTEMS
from sae import pages

#: Okabe and Ito's palette, which colour-blind readers tell apart; systems beyond it repeat with dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
#: Of the plot, in pixels.
WIDTH, HEIGHT, EDGE = 720, 380, 44
#: Questions that are shown.
_SHOWN = 30


def write_page(
    path: str | Path, scores: Mapping[str, Any], units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]
) -> None:
    """Write the scores of several runs as a page; arguments as of `section`."""
    body = Markup(section(scores, units, answered))
    write_text(path, pages.page("sae.pages", "base.html.j2", title="Memory systems", body=body))


def section(scores: Mapping[str, Any], units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]) -> str:
    """What an evaluation's page shows of memory systems, as HTML.

    Args:
        scores: as `score_units` returns them.
        units: of the runs, for the questions side by side.
        answered: rows of predictions by system and question.
    """
    datasets = list(dict.fromkeys(row["dataset"] for row in scores["rows"]))
    sections = [
        _section(name, scores, [unit for unit in units if unit["dataset"] == name], answered) for name in datasets
    ]
    return pages.section(
        "remind.memory",
        "report.html.j2",
        sections=sections,
        plot=(WIDTH, HEIGHT, EDGE),
        personal=("p13n", *LABELS),
        stages=BUCKETS,
        **{key: scores[key] for key in ("p13n", "failures", "notes")},
    )


def _section(
    dataset: str, scores: Mapping[str, Any], units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]
) -> dict[str, Any]:
    rows = [row for row in scores["rows"] if row["dataset"] == dataset]
    places = list(dict.fromkeys((row["at"], row["value"]) for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    at = {(row["system"], row["at"], row["value"]): row for row in rows}
    return {
        "dataset": dataset,
        "heads": [f"{value:,} tokens" if kind == "tokens" else f"@{value}" for kind, value in places],
        "table": [(name, [at.get((name, *place)) for place in places]) for name in systems],
        "costs": [row for row in scores["costs"] if row["dataset"] == dataset],
        "columns": COLUMNS,
        "paper": [
            (name, SYSTEMS[name].row, SYSTEMS[name].paper.values())
            for name in systems
            if name in SYSTEMS and SYSTEMS[name].row is not None
        ],
        "lines": _lines(rows, systems),
        "questions": _side_by_side(units, answered),
    }


def _lines(rows: Sequence[Mapping[str, Any]], systems: Sequence[str]) -> dict[str, Any]:
    """Recall over tokens: a line per system through all of its places."""
    known = [row for row in rows if row["recall"] is not None and row["tokens"] > 0]
    if not known:
        return {"curves": [], "ticks": []}
    low = math.log10(max(10.0, min(row["tokens"] for row in known)))
    high = max(math.log10(max(row["tokens"] for row in known)), low + 0.1)

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        share = (math.log10(max(10.0, row["tokens"])) - low) / (high - low)
        return EDGE + share * (WIDTH - 2 * EDGE), HEIGHT - EDGE - row["recall"] * (HEIGHT - 2 * EDGE)

    curves = []
    for number, name in enumerate(systems):
        points = sorted(place(row) for row in known if row["system"] == name)
        if points:
            dash = ("", "5 3", "2 2")[number // len(COLOURS) % 3]
            curves.append({"name": name, "colour": COLOURS[number % len(COLOURS)], "dash": dash, "points": points})
    decades = [
        step * 10**power for power in range(1, 6) for step in (1, 3) if low <= math.log10(step * 10**power) <= high
    ]
    ticks = [(place({"tokens": tokens, "recall": 0.0})[0], f"{tokens:,}") for tokens in decades]
    return {"curves": curves, "ticks": ticks}


def _side_by_side(units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Questions with what each system showed first; those come first on which the systems differ most."""
    by_question: dict[str, dict[str, Any]] = {}
    for unit in units:
        for row in unit["rows"]:
            entry = by_question.setdefault(row["question"], {"row": row, "dialogue": unit["dialogue"], "systems": []})
            answer = answered.get(unit["system"], {}).get(row["question"])
            if not row["shown"] and answer is None:
                continue
            gold = {*row["evidence"]}
            memories = [
                {"text": text, "gold": bool(gold & {*(sources or ())}), "time": when, "tokens": tokens}
                for text, (_, sources, tokens, when) in zip(row["shown"], row["top"], strict=False)
            ]
            hits = sum(memory["gold"] for memory in memories)
            entry["systems"].append({"name": unit["system"], "memories": memories, "hits": hits, "answer": answer})

    def spread(entry: Mapping[str, Any]) -> int:
        hits = [one["hits"] for one in entry["systems"] if one["name"] not in ("gold", "full_context")]
        return max(hits, default=0) - min(hits, default=0)

    return sorted(by_question.values(), key=spread, reverse=True)[:_SHOWN]
