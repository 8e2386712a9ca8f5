"""Fleiss' κ of the annotators before discussion, by dimension and format (Appendix D.3; Fleiss 1971).

Units: a single-choice item is one subject and its options are the categories. Where any set may be chosen, each option
(multi) or candidate answer (direct, with "an answer of one's own" as one more) is a subject decided yes or no, because
a set has no place among few nominal categories. Figures over several formats take every option of every item as such
a yes or no, single choice too. κ of single choice nears 0 where the right letter hardly varies, however well annotators
agree: chance alone would then agree as often.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from remind.core.errors import ConfigError
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.refmem.annotation.rows import Row
from remind.refmem.annotation.shown import letters
from remind.refmem.items import Item

#: item id → annotator → row.
Ballots = Mapping[str, Mapping[str, Row]]

Subject = tuple[str, ...]


def fleiss(subjects: Sequence[Subject]) -> float | None:
    """κ of subjects that all have the same number of ratings, one label each.

    Returns:
        None where it is undefined: no subject, fewer than two raters, or one label throughout.

    Raises:
        ConfigError: subjects with different numbers of ratings, or statsmodels is not installed.
    """
    if not subjects or len(subjects[0]) < 2:
        return None
    if len({len(subject) for subject in subjects}) > 1:
        raise ConfigError("Fleiss' kappa needs the same number of ratings for every subject")
    try:
        from statsmodels.stats.inter_rater import fleiss_kappa
    except ImportError:
        raise ConfigError("agreement needs statsmodels: pip install 'remind-toolkit[refmem]'") from None
    labels = sorted({label for subject in subjects for label in subject})
    if len(labels) < 2:
        return None
    place = {label: n for n, label in enumerate(labels)}
    table = np.zeros((len(subjects), len(labels)))
    for n, subject in enumerate(subjects):
        for label in subject:
            table[n, place[label]] += 1
    value = float(fleiss_kappa(table, method="fleiss"))
    return value if math.isfinite(value) else None


def phrase(text: str) -> str:
    """A phrase for comparison: Unicode form, case, punctuation and spacing do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded)) or folded.strip()


def decisions(item: Item, answers: Iterable[str]) -> tuple[bool, ...]:
    """Yes or no to every option; for direct items to every candidate and, last, to "an answer of one's own"."""
    if item.format != "direct":
        chosen = set(answers)
        return tuple(letter in chosen for letter in letters(item))
    candidates = list(dict.fromkeys(phrase(text) for text in item.candidates))
    said = {phrase(text) for text in answers}
    return (*(text in said for text in candidates), bool(said - set(candidates)))


def subjects_of(item: Item, rows: Sequence[Row], unit: Literal["format", "decision"] = "format") -> list[Subject]:
    """What an item adds to κ; `unit` "decision" takes single choice by its options too."""
    if unit == "format" and item.format == "single":
        return [tuple(row.answers[0] for row in rows)]
    columns = [decisions(item, row.answers) for row in rows]
    return [tuple("yes" if yes else "no" for yes in column) for column in zip(*columns, strict=True)]


def agreement(items: Sequence[Item], ballots: Ballots, annotators: Sequence[str]) -> dict[str, Any]:
    """κ over the items that every annotator answered.

    Returns:
        annotators, `formats` (single, multi, direct), `dimensions` (each: `all` and its formats), `all` and `remove`
        (the flag to remove, over items that every annotator has a row for). Each figure: kappa (None: undefined),
        items, subjects, left_out (items that someone skipped or answered only by the flag).
    """
    found: dict[str, Any] = {
        "annotators": list(annotators),
        "all": _figure(items, ballots, annotators, "decision"),
        "formats": {
            kind: _figure([item for item in items if item.format == kind], ballots, annotators, "format")
            for kind in FORMATS
        },
        "dimensions": {},
    }
    for dimension in DIMENSIONS:
        inside = [item for item in items if item.dimension == dimension]
        if inside:
            row = {"all": _figure(inside, ballots, annotators, "decision")}
            for kind in FORMATS:
                row[kind] = _figure([item for item in inside if item.format == kind], ballots, annotators, "format")
            found["dimensions"][dimension] = row
    flags = [_rows(ballots, item, annotators) for item in items]
    whole = [rows for rows in flags if rows is not None]
    subjects = [tuple("remove" if row.remove else "keep" for row in rows) for rows in whole]
    found["remove"] = {
        "kappa": fleiss(subjects),
        "items": len(whole),
        "subjects": len(subjects),
        "left_out": len(items) - len(whole),
    }
    return found


def _rows(ballots: Ballots, item: Item, annotators: Sequence[str]) -> list[Row] | None:
    rows = ballots.get(item.id, {})
    return [rows[name] for name in annotators] if all(name in rows for name in annotators) else None


def _figure(
    items: Sequence[Item], ballots: Ballots, annotators: Sequence[str], unit: Literal["format", "decision"]
) -> dict[str, Any]:
    subjects: list[Subject] = []
    used = 0
    for item in items:
        rows = _rows(ballots, item, annotators)
        if rows and all(row.answers for row in rows):
            used += 1
            subjects += subjects_of(item, rows, unit)
    return {"kappa": fleiss(subjects), "items": used, "subjects": len(subjects), "left_out": len(items) - used}
