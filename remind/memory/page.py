"""What a page shows of memory systems: tables, and questions side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from remind.core.files import write_text
from remind.evaluation.compare import Rows
from remind.evaluation.personalisation import BUCKETS, LABELS
from remind.memory.systems import COLUMNS, ROWS, TABLE_1
from sae import pages
from sae.figures import COLOURS, Picture, new_figure

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
        "drawn": _recall(at, systems),
        "costs": [row for row in scores["costs"] if row["dataset"] == dataset],
        "columns": COLUMNS,
        "paper": [(name, row, TABLE_1[row]) for name in systems if (row := ROWS.get(name)) is not None],
        "questions": _side_by_side(units, answered),
    }


def _recall(rows: Mapping[tuple[str, str, int], Mapping[str, Any]], systems: Sequence[str]) -> Markup:
    """The recall of each system with its interval over the tokens that it took, as a plot."""
    figure = new_figure(4.8, 4.6)
    axes = figure.subplots()
    for number, name in enumerate(systems):
        known = [row for (system, *_), row in rows.items() if system == name and row["recall"] is not None]
        if points := sorted((row["tokens"], row["recall"], row["low"], row["high"]) for row in known):
            tokens, recall, low, high = zip(*points, strict=True)
            # seven colours that show on light and on dark, then another marker
            colour, marker = COLOURS[number % 7], "osv^Dx"[number // 7 % 6]
            axes.plot(tokens, recall, color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
            axes.vlines(tokens, low, high, color=colour, linewidth=0.6)
    axes.set_xscale("log", subs=(2, 5))
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis("{x:,.0f}")
    axes.set(ylim=(0, 1.02), xlabel="tokens of what was retrieved", ylabel="evidence recall")
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower left")
    return Markup(Picture(figure).svg())


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
