"""Runs of `remind run-memory` as baselines: the answers of their systems, and what these took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.evaluation.tables import markdown_table
from remind.memory.score import MANIFEST, costs, read_costs, read_units

#: Columns of what a system took: heading, where the figure is in a row of `costs`, and its form.
_COLUMNS: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("questions", ("questions",), ",d"),
    ("calls to ingest", ("ingest", "calls"), ",.0f"),
    ("tokens", ("ingest", "tokens"), ",.0f"),
    ("USD", ("ingest", "usd"), ".4f"),
    ("calls for a question", ("question", "calls"), ".2f"),
    ("tokens", ("question", "tokens"), ",.1f"),
    ("USD", ("question", "usd"), ".6f"),
    ("ms of a retrieval, p50", ("p50_ms",), ".1f"),
    ("p95", ("p95_ms",), ".1f"),
    ("bytes on disk", ("bytes",), ",d"),
)


def answers(folder: Path) -> dict[str, Path] | None:
    """The answers of each system of a run of memory systems, by name; None: the folder is no such run.

    Raises:
        DataError: the run has no answers, since no model was named for them.
    """
    if not (folder / MANIFEST).is_file() or not (folder / "memory").is_dir():
        return None
    found = {path.stem: path for path in sorted((folder / "answers").glob("*.jsonl"))}
    if not found:
        raise DataError("the run has no answers; give `remind run-memory` an endpoint for them", folder)
    return found


def taken(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows of `remind.memory.score.costs`, one for each system and dataset of the runs.

    Raises:
        DataError: a run that has not come to its end.
    """
    rows = []
    for folder in folders:
        units, spent = list(read_units(folder)), list(read_costs(folder))
        for dataset, name in dict.fromkeys((unit["dataset"], unit["system"]) for unit in units):
            own = [unit for unit in units if (unit["dataset"], unit["system"]) == (dataset, name)]
            rows.append(costs(dataset, name, own, spent))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the systems took, as lines of Markdown; none where there are no rows."""
    if not rows:
        return []
    body = []
    for row in rows:
        cells = [row["system"], row["dataset"]]
        for _, place, form in _COLUMNS:
            value: Any = row
            for step in place:
                value = value[step]
            cells.append("–" if value is None else format(value, form))
        body.append(cells)
    heads = ["System", "dialogues of", *(head for head, *_ in _COLUMNS)]
    return ["## What memory systems took", "", markdown_table(heads, body)]
