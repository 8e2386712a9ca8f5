"""LongMemEval's hypothesis and judged rows: reading, accuracy by question type (Wu et al., 2025)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.official.files import ResultFile
from remind.core.errors import ConfigError, DataError
from remind.evaluation.judge import LONGMEMEVAL
from remind.evaluation.statistics import wilson

TYPES = tuple(LONGMEMEVAL)
LABEL = "autoeval_label"


@dataclass(frozen=True)
class Reference:
    """A question with its gold answer: a phrase, a rubric (preference), or why it cannot be answered (abstention)."""

    question_id: str
    question: str
    answer: str
    type: str

    @property
    def abstention(self) -> bool:
        return "_abs" in self.question_id


def load_references(path: str | Path) -> dict[str, Reference]:
    """Questions by id: from native instances, or from rows `id, query, gold_answers, meta.question_type`.

    Raises:
        DataError: a record that is neither, or a question id twice.
    """
    file = ResultFile(path)
    references: dict[str, Reference] = {}
    for index, record in enumerate(file.records):
        native = "question_id" in record
        meta = record.get("meta")
        answers = [record.get("answer")] if native else record.get("gold_answers")
        values = (
            record.get("question_id" if native else "id"),
            record.get("question" if native else "query"),
            answers[0] if isinstance(answers, list) and answers else None,
            record.get("question_type") if native else (meta.get("question_type") if isinstance(meta, dict) else None),
        )
        if any(not isinstance(value, str | int | float) for value in values):
            message = "not a LongMemEval question: it needs question_id, question, answer and question_type"
            raise DataError(message, path, file.place(index))
        reference = Reference(*map(str, values))
        if reference.type not in TYPES:
            raise DataError(f"unknown question type {reference.type!r}", path, reference.question_id)
        if reference.question_id in references:
            raise DataError("this question id occurs twice", path, reference.question_id)
        references[reference.question_id] = reference
    return references


def is_rows(file: ResultFile) -> bool:
    """Whether the file holds LongMemEval's rows, judged or not."""
    return bool(file.records) and {"question_id", "hypothesis"} <= file.records[0].keys()


def check_rows(file: ResultFile) -> None:
    """Raise DataError for a row without id or hypothesis, an id twice, or a label that is not true, false or null."""
    seen: set[str] = set()
    for index, row in enumerate(file.records):
        name = row.get("question_id")
        if not isinstance(name, str) or not isinstance(row.get("hypothesis"), str):
            raise DataError("a row needs question_id and hypothesis, both text", file.path, file.place(index))
        if name in seen:
            raise DataError(f"question {name!r} is answered twice", file.path, file.place(index))
        seen.add(name)
        label = row.get(LABEL)
        judged = isinstance(label, dict) and (label.get("label") is None or isinstance(label.get("label"), bool))
        if label is not None and not judged:
            raise DataError(f"{LABEL} should be {{model, label: true | false}}", file.path, file.place(index))


def verdict_of(row: Mapping[str, Any]) -> bool | None:
    """The row's label; None where it has none."""
    label = row.get(LABEL)
    return label.get("label") if isinstance(label, dict) else None


def score_rows(rows: Sequence[Mapping[str, Any]], references: Mapping[str, Reference]) -> dict[str, Any]:
    """Accuracy by type, over all, and of abstention, each an `Estimate` with Wilson's interval.

    Types and `overall` hold the abstention questions, as the benchmark's own scorer has it; `abstention` shows them
    apart and `answerable` is the rest. `task_averaged` is the mean of the types' accuracies. Rows without a verdict are
    in no accuracy and counted; rows whose question is unknown are left out and counted.

    Raises:
        ConfigError: no row of a known question.
    """
    known = [row for row in rows if row["question_id"] in references]
    if not known:
        raise ConfigError("no row's question is among the references: wrong file of questions?")
    answered = {row["question_id"] for row in known}
    judged = [(references[row["question_id"]], verdict) for row in known if (verdict := verdict_of(row)) is not None]

    def share(keep: Callable[[Reference], bool]) -> Any:
        return wilson([float(verdict) for reference, verdict in judged if keep(reference)])

    by_type = {name: share(lambda reference, name=name: reference.type == name) for name in TYPES}  # type: ignore[misc]
    values = [row["value"] for row in by_type.values() if row]
    return {
        "overall": share(lambda _: True),
        "task_averaged": sum(values) / len(values) if values else None,
        "by_type": by_type,
        "abstention": share(lambda reference: reference.abstention),
        "answerable": share(lambda reference: not reference.abstention),
        "judges": dict(Counter(str(row[LABEL].get("model")) for row in known if verdict_of(row) is not None)),
        "counts": {
            "rows": len(rows),
            "judged": len(judged),
            "without_verdict": len(known) - len(judged),
            "unknown_question": len(rows) - len(known),
            "unanswered": len(references.keys() - answered),
        },
    }
