"""The plain baselines: a dialogue's own words, cut into turns, rounds or sessions, and ranked for the question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from remind.data.dialogue import Session, Turn
from remind.memory.bank import Bank, Method
from remind.memory.base import Draft, Query, System
from remind.states.pyramid import turn_lines, turn_text

Unit = Literal["turn", "round", "session"]


@dataclass(frozen=True)
class PlainSystem(System):
    """Raw words, nothing written by a model.

    Attributes:
        unit: what a memory is. A round is what is said until the opener of the session speaks again.
        method: how memories are ranked; newest: the last first. Only dense and hybrid encode anything.
        keys: what a memory is found by: each of its turns, or all of its words together.
    """

    unit: Unit = "turn"
    method: Method | Literal["newest"] = "dense"
    keys: Literal["turns", "whole"] = "turns"


class PlainBank(Bank, of=PlainSystem):
    system: PlainSystem

    def remember(self, session: Session) -> None:
        system, drafts, texts = self.system, list[Draft](), list[str]()
        for part in cut(session, system.unit):
            lines = [turn_text(turn) for turn in part]
            # a single key is the memory's own text
            keys = (None,) if system.keys == "whole" or len(lines) == 1 else tuple(lines)
            drafts.append(Draft(system.unit, tuple(turn.id for turn in part), keys=keys))
            texts.append("\n".join(map(turn_lines, part)))
        self.put_all(drafts, texts, encoded=system.method in ("dense", "hybrid"))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        if self.system.method == "newest":
            return ((number, float(number)) for number in reversed(self.store.numbers()))
        return self.store.rank(query.text, self.system.method)


def cut(session: Session, unit: Unit) -> Iterator[tuple[Turn, ...]]:
    """The turns of a session in stretches."""
    if unit == "session":
        yield session.turns
        return
    stretch: list[Turn] = []
    for turn in session.turns:
        opens = turn.speaker == session.turns[0].speaker and stretch and stretch[-1].speaker != turn.speaker
        if stretch and (unit == "turn" or opens):
            yield tuple(stretch)
            stretch = []
        stretch.append(turn)
    yield tuple(stretch)
