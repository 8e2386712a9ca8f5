"""Figure 6: one question answered by two systems, with the inspector's page of its grounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import Setting, ask, settings
from experiments.paper.systems import foreign_rows, named_paths, split_records
from remind.core.errors import ConfigError, DataError
from remind.evaluation.compare import Rows
from remind.evaluation.tables import markdown_table
from remind.states.records import StateRecord
from remind.viewing.config import InspectConfig
from remind.viewing.inspector.page import inspect_grounding

GROUNDING = "grounding.html"


def fig6(cfg: PaperConfig) -> Result:
    """Both answers, their evidence and the gold, and the page of the grounding.

    Raises:
        ConfigError: fewer than two systems, or no question that they answer differently.
        DataError: no such question, or answers that cannot be used.
    """
    assert cfg.out is not None
    out, setting = Path(cfg.out), settings(cfg)[0]
    systems = _systems(cfg, setting, out)
    record = _chosen(cfg, split_records(setting)[0], list(systems.values()))
    shown = {name: _account(record, rows[record.question_id]) for name, rows in systems.items()}
    inspected = InspectConfig(
        states=setting.evaluate.states,
        question=record.question_id,
        out=str(out / GROUNDING),
        corpus=setting.evaluate.corpus or None,
        format=setting.evaluate.corpus_format,
        overwrite=True,
    )
    inspect_grounding(inspected)
    data = {"question": record.question_id, "gold": list(record.answers), "systems": shown}
    return Result(data, _table(record, shown), None)


def _systems(cfg: PaperConfig, setting: Setting, out: Path) -> dict[str, Rows]:
    if cfg.small and not cfg.systems:
        runs = ask(setting, out / "answers", ["x0", "x2"])
        return {f"{setting.evaluate.model}, {name}": run.rows for name, run in runs.items()}
    given = named_paths(cfg.systems)
    if len(given) != 2:
        raise ConfigError(f"fig6 puts two systems side by side, not {len(given)}; name them as --systems")
    return {name: foreign_rows(setting, name, path, out / f"system-{name}") for name, path in given.items()}


def _chosen(cfg: PaperConfig, records: Sequence[StateRecord], systems: Sequence[Rows]) -> StateRecord:
    if cfg.question is not None:
        for record in records:
            if record.question_id == cfg.question:
                return record
        raise DataError("is no question that the systems were asked", record=cfg.question)
    for record in records:
        if len({rows[record.question_id].get("accuracy") for rows in systems}) > 1:
            return record
    raise ConfigError("both systems are right or wrong on the same questions; name one as --question")


def _account(record: StateRecord, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a system said, and which of its evidence is gold."""
    cited = [f"image {index}" for index in row["images"]] if record.visual else list(row["evidence"])
    gold = {f"image {index}" for index in record.images} if record.visual else set(record.evidence_lines)
    return {
        "answer": row["answer"],
        "right": row["accuracy"] == 1.0,
        "evidence": [{"line": line, "gold": line in gold} for line in cited],
    }


def _rows(record: StateRecord, shown: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    def evidence(one: Mapping[str, Any]) -> str:
        lines = [f"{'✓' if line['gold'] else '✗'} {line['line']}" for line in one["evidence"]]
        return "; ".join(lines) or "none quoted"

    options = "; ".join(f"{letter}. {text}" for letter, text in zip("ABCDEFGH", record.options, strict=False))
    gold = [f"image {index}" for index in record.images] if record.visual else list(record.evidence_lines)
    return [
        ["question", " ".join([record.question, options]).strip()],
        ["gold answer", ", ".join(record.answers)],
        ["gold evidence", "; ".join(gold) or "none"],
        *(
            [name, f"{one['answer']} ({'right' if one['right'] else 'wrong'}); evidence: {evidence(one)}"]
            for name, one in shown.items()
        ),
    ]


def _table(record: StateRecord, shown: Mapping[str, Mapping[str, Any]]) -> str:
    # a line of a dialogue may hold what Markdown takes for the end of a cell
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in _rows(record, shown)]
    return markdown_table(["", record.question_id], cells)
