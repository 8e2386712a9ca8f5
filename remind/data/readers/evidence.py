"""Evidence references as annotators wrote them, resolved to turn ids.

LoCoMo and REALTALK name turns `D<session>:<turn>`, but also `D8:6; D9:17`, `D:11:26`, `D30:05`, `D17;39`, `D1:3-5`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remind.data.readers.source import Place, shown

_ID = re.compile(r"D(\d{1,6}):(\d{1,6})", re.ASCII)
_TOKEN = re.compile(
    r"""
      D\s*+[:;.,]?+\s*+(?P<session>\d{1,6}) (?:\s*+[:;.,]\s*+|\s++) (?P<turn>\d{1,6})(?!\d)
    | (?P<bare_session>\d{1,6}) \s*+:\s*+ (?P<bare_turn>\d{1,6})(?!\d)
    | (?P<number>\d{1,6})(?![\d\w])
    | (?P<range>[-–—~]|to\b)
    | (?:and\b|[\s,;.:&+/|()\[\]'"])+
    | (?P<other>[^\s,;.:&+/|()\[\]'"]+)
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """References of one question.

    Attributes:
        turn_ids: the turns they name, each once, in the order written.
        dangling: references that name no turn, as written (a number that continues a session with that session).
        references: number of references: every turn named (repetitions count) and every dangling one.
    """

    turn_ids: tuple[str, ...] = ()
    dangling: tuple[str, ...] = ()
    references: int = 0


def exact(references: Iterable[str], known: Iterable[str]) -> Resolved:
    """References that are turn ids, letter for letter."""
    ids, references = set(known), list(references)
    return Resolved(
        tuple(dict.fromkeys(r for r in references if r in ids)),
        tuple(r for r in references if r not in ids),
        len(references),
    )


def evidence_texts(place: Place, value: object) -> list[str]:
    """The references of an `evidence` field: none, one or a list, numbers as their digits. Raises DataError."""
    items = value if isinstance(value, list) else [value]
    return [
        str(item) if isinstance(item, int) and not isinstance(item, bool) else place.text(item, "evidence")
        for item in items
        if item is not None
    ]


class EvidenceIndex:
    """The turn ids of one dialogue, in order, by which references resolve."""

    def __init__(self, turn_ids: Sequence[str]) -> None:
        self._ids = list(turn_ids)
        self._position = {turn_id: position for position, turn_id in enumerate(self._ids)}
        self._by_number: dict[tuple[int, int], str] = {}
        for turn_id in self._ids:
            if match := _ID.fullmatch(turn_id):
                self._by_number.setdefault((int(match[1]), int(match[2])), turn_id)
        self._ordered = sorted(self._by_number)

    def resolve(self, references: object) -> Resolved:
        """Resolve an `evidence` field: a list of strings, or one string. Blank strings name nothing.

        A range names its ends and every turn between them: by number within a session, by position across sessions.
        A number alone continues the session before it (`D1:3, 5`). Text that is no reference dangles.
        """
        items = references if isinstance(references, list) else [references]
        # counted, since a hostile file can name the same turns very often
        turns: Counter[str] = Counter()
        dangling: list[str] = []
        for item in items:
            if item is not None:
                self._read(item if isinstance(item, str) else shown(item), turns, dangling)
        return Resolved(tuple(turns), tuple(dangling), sum(turns.values()) + len(dangling))

    def _read(self, text: str, turns: Counter[str], dangling: list[str]) -> None:
        if name := next((name for name in (text, text.strip()) if name in self._position), None):
            turns[name] += 1
            return
        last: tuple[int, int] | None = None
        in_range = False
        junk: list[str] = []
        for token in _TOKEN.finditer(text):
            if token["range"]:
                in_range = last is not None
                continue
            if token["session"]:
                here = (int(token["session"]), int(token["turn"]))
            elif token["bare_session"]:
                here = (int(token["bare_session"]), int(token["bare_turn"]))
            elif token["number"] and last is not None:
                here = (last[0], int(token["number"]))
            else:
                if token["number"] or token["other"]:
                    junk.append(token[0])
                continue
            if in_range and last is not None:
                turns.update(self._between(last, here))
            if here in self._by_number:
                turns[self._by_number[here]] += 1
            else:
                dangling.append(f"D{last[0]}:{token[0]}" if token["number"] and last else token[0].strip())
            last, in_range = here, False
        if junk:
            dangling.append(" ".join(junk) if last else text.strip())

    def _between(self, first: tuple[int, int], last: tuple[int, int]) -> list[str]:
        """Turns strictly between two references."""
        if first[0] == last[0]:
            inside = self._ordered[bisect_right(self._ordered, first) : bisect_left(self._ordered, last)]
            return [self._by_number[number] for number in inside]
        if first not in self._by_number or last not in self._by_number:
            return []
        start, end = (self._position[self._by_number[number]] for number in (first, last))
        return self._ids[start + 1 : end]
