"""Fleiss' κ of the annotators before discussion, by dimension and format (Appendix D.3; Fleiss 1971).

Units: a single-choice item is one subject and its options are the categories. Where any set may be chosen, each option
(multi) or candidate answer (direct, with "an answer of one's own" as one more) is a subject decided yes or no, because
a set cannot be one of few nominal categories. Figures over several formats take every option of every item as such a
yes or no, single choice too. κ of single choice nears 0 where the right letter hardly varies, however well annotators
agree: chance alone would then agree as often.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.evaluation.statistics import fleiss_kappa
from remind.refmem.annotations import Row
from remind.refmem.items import Item

#: item id → annotator → row.
Ballots = Mapping[str, Mapping[str, Row]]


def phrase(text: str) -> str:
    """A phrase for comparison, without differences of Unicode form, case, punctuation and spacing."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded)) or folded.strip()


def decisions(item: Item, answers: Iterable[str]) -> tuple[bool, ...]:
    """Yes or no to every option; for direct items to every candidate and, last, to "an answer of one's own"."""
    if item.format != "direct":
        chosen = set(answers)
        return tuple(letter in chosen for letter in item.letters)
    candidates = list(dict.fromkeys(map(phrase, item.candidates)))
    phrases = set(map(phrase, answers))
    return (*(text in phrases for text in candidates), bool(phrases - set(candidates)))


def subjects_of(item: Item, rows: Sequence[Row], by_option: bool) -> list[tuple[str, ...]]:
    """The subjects of an item; `by_option`: single choice by its options too."""
    if item.format == "single" and not by_option:
        return [tuple(row.answers[0] for row in rows)]
    columns = [decisions(item, row.answers) for row in rows]
    return [tuple("yes" if yes else "no" for yes in subject) for subject in zip(*columns, strict=True)]


def agreement(items: Sequence[Item], ballots: Ballots, annotators: Sequence[str]) -> dict[str, Any]:
    """κ over the items that every annotator answered.

    Returns:
        annotators, `formats` (single, multi, direct), `dimensions` (each: `all` and its formats), `all` and `remove`
        (the flag to remove, over items that every annotator has a row for). Each figure: kappa (None: undefined),
        items, subjects, left_out (items that someone skipped or only flagged for removal).
    """
    complete = {
        item.id: [ballots[item.id][name] for name in annotators]
        for item in items
        if all(name in ballots.get(item.id, ()) for name in annotators)
    }

    def overall(members: Sequence[Item], by_option: bool = True) -> dict[str, Any]:
        answered = [item for item in members if item.id in complete and all(row.answers for row in complete[item.id])]
        subjects = [subject for item in answered for subject in subjects_of(item, complete[item.id], by_option)]
        return _figure(subjects, len(answered), len(members))

    def by_format(members: Sequence[Item]) -> dict[str, Any]:
        return {kind: overall([item for item in members if item.format == kind], by_option=False) for kind in FORMATS}

    dimensions = {name: [item for item in items if item.dimension == name] for name in DIMENSIONS}
    flags = [tuple("remove" if row.remove else "keep" for row in rows) for rows in complete.values()]
    return {
        "annotators": list(annotators),
        "all": overall(items),
        "formats": by_format(items),
        "dimensions": {
            name: {"all": overall(members), **by_format(members)} for name, members in dimensions.items() if members
        },
        "remove": _figure(flags, len(flags), len(items)),
    }


def _figure(subjects: Sequence[Sequence[str]], used: int, given: int) -> dict[str, Any]:
    return {"kappa": fleiss_kappa(subjects), "items": used, "subjects": len(subjects), "left_out": given - used}
