"""Conditions side by side: paired differences of their scores, over the questions that two of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remind.data.dialogue import FORMATS
from remind.evaluation.paired import Difference, paired_bootstrap
from remind.evaluation.scores import Score

#: What is compared; `accuracy_failures_wrong` counts failures as wrong, so that both sides keep every question.
COMPARED = ("accuracy", "accuracy_failures_wrong", "memory_recall", "f1", "evidence_recall")


def reference(names: Sequence[str]) -> str:
    """What the others are compared with: x0, which is what inference sees, else the first."""
    return "x0" if "x0" in names else names[0]


def value_of(measure: str) -> Callable[[Score], float | None]:
    """A score's value in a measure; None: it takes no part."""
    if measure == "accuracy_failures_wrong":
        return lambda item: (item.accuracy or 0.0) if item.record.answers else None
    return lambda item: getattr(item, measure)


def differences(
    scores: Mapping[str, Sequence[Score]], base: str, resamples: int, seed: int
) -> dict[str, dict[str, dict[str, Difference | None]]]:
    """For each condition but the base, by "all" and format, by measure: its mean less the base's, with interval."""
    found: dict[str, dict[str, dict[str, Difference | None]]] = {}
    for name, own in scores.items():
        if name == base:
            continue
        groups: dict[str, dict[str, Difference | None]] = {}
        for group in ("all", *FORMATS):
            some = [item for item in own if group in ("all", item.record.format)]
            if some:
                groups[group] = {m: paired(scores[base], some, value_of(m), resamples, seed) for m in COMPARED}
        found[name] = groups
    return found


def paired(
    first: Sequence[Score],
    second: Sequence[Score],
    value: Callable[[Score], float | None],
    resamples: int,
    seed: int,
) -> Difference | None:
    """The second less the first, over the questions that take part in both."""
    before = {item.record.question_id: value(item) for item in first}
    pairs = [
        (old, new)
        for item in second
        if (new := value(item)) is not None and (old := before.get(item.record.question_id)) is not None
    ]
    return paired_bootstrap([old for old, _ in pairs], [new for _, new in pairs], None, resamples, seed)


def summary(difference: Mapping[str, Any] | None) -> str:
    """`+4.0 [-1.2, 9.1]` in points; an en dash where no question takes part in both."""
    if difference is None:
        return "–"
    text = f"{100 * difference['value']:+.1f}"
    if difference["low"] is None:
        return text
    return f"{text} [{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}]"
