"""What the votes on one item come to: its answers, its evidence, and whether it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from remind.refmem.annotation.agreement import phrase
from remind.refmem.annotation.rows import Row
from remind.refmem.items import Item

Part = Literal["remove", "answers", "evidence"]


@dataclass
class Outcome:
    """What a majority decides; what it does not stands in `open`.

    Attributes:
        remove: None where as many want it removed as kept.
        answers: None without a majority. evidence, images: those most of the annotators who checked them name.
        open: parts no majority decides ("unannotated": too few rows). differ: parts on which anyone differs.
    """

    remove: bool | None = None
    answers: tuple[str, ...] | None = None
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    open: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)


def decide(item: Item, rows: Sequence[Row], quorum: int = 1) -> Outcome:
    """The outcome of an item's rows; a majority is more than half.

    Remove: of all rows. Answers: of the rows that answer; single and multi: of the whole set of letters, so that no
    set comes out that nobody chose; direct: of each phrase, in the writing most used. Evidence: of each turn and image,
    among the rows that tick any. A removed item needs nothing else.
    """
    out = Outcome()
    if len(rows) < quorum or not rows:
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
    if len({_key(item, row) for row in answered}) > 1:
        out.differ.append("answers")
    checked = [row for row in rows if row.evidence or row.images]
    turns = Counter(turn for row in checked for turn in set(row.evidence))
    images = Counter(image for row in checked for image in set(row.images))
    out.evidence = tuple(turn for turn in _ordered(item, turns) if 2 * turns[turn] > len(checked))
    out.images = tuple(sorted(image for image, n in images.items() if 2 * n > len(checked)))
    if len({(frozenset(row.evidence), frozenset(row.images)) for row in checked}) > 1:
        out.differ.append("evidence")
    if out.remove is not True:
        if not out.answers:
            out.open.append("answers")
        if not out.evidence and not out.images:
            out.open.append("evidence")
    return out


def _key(item: Item, row: Row) -> frozenset[str]:
    return frozenset(map(phrase, row.answers)) if item.format == "direct" else frozenset(row.answers)


def _letters(answered: Sequence[Row]) -> tuple[str, ...] | None:
    if not answered:
        return None
    (most, n), *_ = Counter(frozenset(row.answers) for row in answered).most_common(1)
    return tuple(sorted(most)) if 2 * n > len(answered) else None


def _phrases(answered: Sequence[Row]) -> tuple[str, ...] | None:
    votes = Counter(key for row in answered for key in dict.fromkeys(map(phrase, row.answers)))
    written: dict[str, Counter[str]] = {}
    for row in answered:
        for text in row.answers:
            written.setdefault(phrase(text), Counter())[text] += 1
    kept = [key for key, n in votes.most_common() if 2 * n > len(answered)]
    return tuple(written[key].most_common(1)[0][0] for key in kept) or None


def _ordered(item: Item, turns: Mapping[str, int]) -> list[str]:
    """Proposed turns in their order, then added ones by name."""
    return [turn for turn in item.evidence if turn in turns] + sorted(set(turns) - set(item.evidence))
