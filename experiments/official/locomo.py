"""LoCoMo's result JSON: a list of samples whose questions carry `<model>_prediction`, scored by category.

F1 and recall are those of LoCoMo's `task_eval/evaluation.py`, and are written under its names: `<model>_f1`, and
`<model>_recall` where `<model>_prediction_context` lists what was retrieved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.official.files import ResultFile
from remind.core.errors import ConfigError, DataError
from remind.evaluation.metrics import locomo_f1
from remind.evaluation.statistics import bootstrap, several

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
ADVERSARIAL = 5
PREDICTION = "_prediction"


@dataclass(frozen=True)
class Answered:
    """One question with a prediction.

    Attributes:
        f1: None where the gold has no answer (but for category 5, which needs none).
        recall: share of gold evidence retrieved; None without evidence, or without a record of what was retrieved.
    """

    sample_id: str
    question_id: str
    category: int
    f1: float | None
    recall: float | None


def is_samples(file: ResultFile) -> bool:
    """Whether the file is a list of LoCoMo samples."""
    return bool(file.records) and isinstance(file.records[0].get("qa"), list)


def models_of(file: ResultFile) -> list[str]:
    """Names of the models whose predictions the file holds."""
    names: dict[str, None] = {}
    for sample in file.records:
        for item in _items(file, sample):
            names.update({key.removesuffix(PREDICTION): None for key in item if key.endswith(PREDICTION)})
    return list(names)


def _items(file: ResultFile, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = sample.get("qa")
    if not isinstance(items, list) or any(not isinstance(item, dict) for item in items):
        raise DataError("qa should be a list of questions", file.path, str(sample.get("sample_id")))
    return items


def recall_of(evidence: Sequence[str], context: Sequence[str]) -> float | None:
    """Share of the gold references that were retrieved, letter for letter; None where there are none.

    A context of sessions (`S1`, `S2`, ...) counts the session of a reference. LoCoMo's scorer gives 1 for None.
    """
    if not evidence:
        return None
    if context and context[0].startswith("S"):
        sessions = {name[1:] for name in context}
        return sum(reference.split(":")[0][1:] in sessions for reference in evidence) / len(evidence)
    return sum(reference in set(context) for reference in evidence) / len(evidence)


def score_samples(file: ResultFile, model: str | None = None) -> tuple[list[Answered], dict[str, Any]]:
    """Score a model's predictions and set its figures in the records, rounded to three places as the scorer does.

    Figures that already are what they should be are not touched.

    Returns:
        The answered questions, and counts: questions, answered, unanswered (no prediction), without_gold_answer,
        changed (figures in the file that were others).

    Raises:
        ConfigError: no prediction of that model, or several models and none named.
        DataError: a question that is not LoCoMo's, or a prediction that is not text.
    """
    names = models_of(file)
    if model is None and len(names) != 1:
        problem = f"predictions of {', '.join(names)}: name one model" if names else "no predictions"
        raise ConfigError(f"{file.path} holds {problem}")
    if model is not None and model not in names:
        raise ConfigError(f"{file.path} holds no predictions of {model!r}; there are {', '.join(names) or 'none'}")
    name = model or names[0]
    answered: list[Answered] = []
    changed = total = 0
    for sample in file.records:
        for place, item in enumerate(_items(file, sample)):
            total += 1
            where = f"{sample.get('sample_id')}-q{place:03d}"
            if name + PREDICTION not in item:
                continue
            f1, recall = _figures(file, where, item, name)
            answered.append(Answered(str(sample.get("sample_id")), where, item["category"], f1, recall))
            changed += _set(item, name, f1, recall)
    return answered, {
        "model": name,
        "questions": total,
        "answered": len(answered),
        "unanswered": total - len(answered),
        "without_gold_answer": sum(row.f1 is None for row in answered),
        "changed": changed,
    }


def _figures(file: ResultFile, where: str, item: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    category, said, gold = item.get("category"), item[name + PREDICTION], item.get("answer")
    if category not in CATEGORIES or isinstance(category, bool):
        raise DataError(f"category should be 1 to 5, not {category!r}", file.path, where)
    if isinstance(said, int | float):
        said = str(said)
    if not isinstance(said, str):
        raise DataError(f"{name}{PREDICTION} should be text", file.path, where)
    context = item.get(f"{name}{PREDICTION}_context")
    if context is not None and (not isinstance(context, list) or any(not isinstance(c, str) for c in context)):
        raise DataError(f"{name}{PREDICTION}_context should be a list of ids", file.path, where)
    f1 = locomo_f1(said, str(gold), category) if gold is not None or category == ADVERSARIAL else None
    return f1, None if context is None else recall_of(item.get("evidence") or [], context)


def _set(item: dict[str, Any], name: str, f1: float | None, recall: float | None) -> int:
    """Write the figures; how many of them the file had otherwise."""
    figures = {f"{name}_f1": None if f1 is None else _as_written(f1, item["category"])}
    if f"{name}{PREDICTION}_context" in item:
        # the scorer's own rule: where there is nothing to find, all is found
        figures[f"{name}_recall"] = 1 if recall is None else round(recall, 3)
    changed = 0
    for key, wanted in figures.items():
        there = item.get(key)
        same = isinstance(there, int | float) and not isinstance(there, bool) and wanted is not None
        if wanted is None or (same and abs(float(there) - wanted) < 5e-4):  # type: ignore[arg-type]
            continue
        changed += there is not None
        item[key] = wanted
    return changed


def _as_written(f1: float, category: int) -> float:
    """Three places; whole numbers without a point where the scorer writes them so (no word shared, category 5)."""
    whole = category == ADVERSARIAL or (category != 1 and f1 == 0)
    return int(f1) if whole else round(f1, 3)


def by_category(answered: Sequence[Answered], resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """`1`..`5`, `1-4` and `all` → n, `f1` and `recall` as `Estimate` (None where no question takes part).

    `recall` is over the questions that have evidence. `1-4` is what is often published: category 5 rewards a model that
    never answers.
    """
    groups = {str(category): [row for row in answered if row.category == category] for category in CATEGORIES}
    groups = {name: rows for name, rows in groups.items() if rows}
    groups["1-4"] = [row for row in answered if row.category != ADVERSARIAL]
    groups["all"] = list(answered)

    def mean(name: str, rows: list[Answered]) -> Any:
        known = [row for row in rows if getattr(row, name) is not None]
        dialogues = several([row.sample_id for row in known])
        return bootstrap([getattr(row, name) for row in known], resamples, seed, dialogues)

    return {
        name: {"n": len(rows), **{one: mean(one, rows) for one in ("f1", "recall")}} for name, rows in groups.items()
    }
