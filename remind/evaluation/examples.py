"""Questions worth looking at: wrong answers with the evidence found and missed, and failures of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from remind.data.dialogue import FORMATS
from remind.states.pyramid import LETTERS

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

_LONGEST_QUOTE = 1200


def examples(scores: Sequence[Score], limit: int) -> list[dict[str, Any]]:
    """Wrong answers in file order, the formats by turns, with the evidence found and missed."""
    wrong = [[item for item in scores if item.wrong and item.record.format == name] for name in FORMATS]
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
        found = [f"image {index}" for index in record.images if index in record.images_found]
        missed = [f"image {index}" for index in record.images if index not in record.images_found]
        cited = [f"image {index}" for index in sorted(parsed.images)]
    else:
        lines = list(zip(record.evidence, record.evidence_lines, strict=True))
        found = [_cut(line) for turn_id, line in lines if turn_id in record.evidence_found]
        missed = [_cut(line) for turn_id, line in lines if turn_id not in record.evidence_found]
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
        "found": found,
        "missed": missed,
        "cited": cited,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + " […]"
