"""The outcome of the annotators' votes on an item: its answers, its evidence, and whether it stays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from remind.refmem.agreement import phrase
from remind.refmem.annotations import Row
from remind.refmem.items import Item


@dataclass
class Outcome:
    """What the majority decided.

    Attributes:
        remove: None if as many want it removed as kept.
        answers: None without a majority. evidence, images: named by most of the annotators who checked evidence.
        open: parts without a majority: remove, answers, evidence, or "unannotated" (too few rows).
        differ: parts on which annotators differ.
    """

    remove: bool | None = None
    answers: tuple[str, ...] | None = None
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    open: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)


def decide(item: Item, rows: Sequence[Row], quorum: int = 1) -> Outcome:
    """The outcome of an item's rows; a majority is more than half.

    Remove: of all rows. Answers: of the rows that answer; single and multi: of the whole set of letters, so that the
    result is a set somebody chose; direct: of each phrase, in its most common spelling. Evidence: of each turn and
    image, among the rows that tick any. A removed item needs nothing else.
    """
    out = Outcome()
    if len(rows) < max(1, quorum):
        out.open.append("unannotated")
        return out
    flags = sum(row.remove for row in rows)
    out.remove = None if 2 * flags == len(rows) else 2 * flags > len(rows)
    if 0 < flags < len(rows):
        out.differ.append("remove")
    if out.remove is None:
        out.open.append("remove")
    answered = [row for row in rows if row.answers]
    out.answers = _phrases(answered) if item.format == "direct" else _letters(answered)
    normal = phrase if item.format == "direct" else str
    if len({frozenset(map(normal, row.answers)) for row in answered}) > 1:
        out.differ.append("answers")
    checked = [row for row in rows if row.evidence or row.images]
    turns = Counter(turn for row in checked for turn in set(row.evidence))
    images = Counter(image for row in checked for image in set(row.images))
    # proposed turns in their order, then others by name
    ordered = [turn for turn in item.evidence if turn in turns] + sorted(set(turns) - set(item.evidence))
    out.evidence = tuple(turn for turn in ordered if 2 * turns[turn] > len(checked))
    out.images = tuple(sorted(image for image, n in images.items() if 2 * n > len(checked)))
    if len({(frozenset(row.evidence), frozenset(row.images)) for row in checked}) > 1:
        out.differ.append("evidence")
    if out.remove is not True:
        if not out.answers:
            out.open.append("answers")
        if not out.evidence and not out.images:
            out.open.append("evidence")
    return out


def _letters(answered: Sequence[Row]) -> tuple[str, ...] | None:
    for letters, n in Counter(frozenset(row.answers) for row in answered).items():
        if 2 * n > len(answered):
            return tuple(sorted(letters))
    return None


def _phrases(answered: Sequence[Row]) -> tuple[str, ...] | None:
    votes = Counter(key for row in answered for key in dict.fromkeys(map(phrase, row.answers)))
    spellings: dict[str, Counter[str]] = defaultdict(Counter)
    for row in answered:
        for text in row.answers:
            spellings[phrase(text)][text] += 1
    majority = [key for key, n in votes.most_common() if 2 * n > len(answered)]
    return tuple(spellings[key].most_common(1)[0][0] for key in majority) or None
