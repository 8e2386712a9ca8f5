"""SaliMory (2606.04120, Section 3): facts, preferences and a working memory, kept by a filter and a booster and told by
a utilizer, three roles of one policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from remind.data.dialogue import Session, Turn
from remind.llm.request import Request, Stage, from_template
from remind.llm.structured import object_schema
from remind.memory.bank import mapping
from remind.memory.base import TEXT, Memory, Query, System
from remind.memory.logged import NOT_AS_PUBLISHED, LoggedBank, dated, numbered
from remind.memory.operations import BANKS, Occasion, Operation, schema
from remind.states.pyramid import one_line, turn_text
from remind.text.days import day_of
from sae.ranges import PositiveInt

#: Tokens of a reply by role.
ROOM = {"filter": 100, "booster": 2000, "utilizer": 2000}
#: Of a reply by role.
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "filter": object_schema(salient={"type": "boolean"}),
    "booster": schema("booster"),
    "utilizer": object_schema(profile=TEXT, used={"type": "array", "items": {"type": "integer"}}),
}


@dataclass(frozen=True)
class SaliMorySystem(System):
    """Three stores, kept turn by turn. An entry that is superseded or deleted is not shown again; the log has it."""

    templates = ("salimory_filter", "salimory_booster", "salimory_utilizer")
    rules = "the paper, Section 3"
    not_as_published = NOT_AS_PUBLISHED
    name: str = "salimory"
    window_days: PositiveInt = 7
    """Days that an entry stays in working memory, counted at each session and at the question."""
    window_sessions: PositiveInt = 2
    """The same in sessions, where times are not known."""
    whole: PositiveInt = 200
    """Entries up to which booster and utilizer are shown all of them; of more the nearest."""


class SaliMoryBank(LoggedBank, of=SaliMorySystem):
    """A question retrieves one memory, the profile that the utilizer writes for it."""

    system: SaliMorySystem
    keeps_versions = False

    # the offline stage: filter and booster

    def remember(self, session: Session) -> None:
        self._retire(session)
        # all turns are filtered at once
        verdicts = self.send(*(request("filter", self.dialogue_id, shown(session, turn)) for turn in session.turns))
        for turn, verdict in zip(session.turns, verdicts, strict=True):
            if mapping(verdict).get("salient") is True:
                self._boost(session, turn)

    def _retire(self, session: Session) -> None:
        """Delete what has left the window of working memory."""
        now, here = day_of(session.time), self.store.count("sessions")
        gone = []
        for number in self.store.numbers("working"):
            if now is not None and day_of(self.store.memory(number).time) is not None:
                old = self._aged(self.store.memory(number), now)
            else:
                old = here - self.store.note(number)["session"] >= self.system.window_sessions
            gone += [f"m{number}"] if old else []
        first, place = self.first(), (self.dialogue_id, session.id, "working", "DELETE")
        self.commit([Operation(first + count, *place, refs=(name,)) for count, name in enumerate(gone)])

    def _aged(self, memory: Memory, now: date) -> bool:
        """Whether it was said before the window that ends on a day; not where its day is unknown."""
        said = day_of(memory.time)
        return said is not None and now - said > timedelta(days=self.system.window_days)

    def _boost(self, session: Session, turn: Turn) -> None:
        """Do what the booster makes of a turn."""
        entries = self.entries(self._bank(turn_text(turn)))
        data = {**shown(session, turn), "entries": listed((one.store, one.text) for one in entries)}
        ((reply, by),) = self.replies([request("booster", self.dialogue_id, data)])
        occasion = Occasion(self.dialogue_id, session.id, dated(turn.time or session.time), (turn.id,), by)
        self.commit(self.proposed("booster", reply, occasion, entries, self.first()))

    def _bank(self, text: str) -> list[int]:
        """Entries that a role is shown for a text, oldest first."""
        numbers = self.store.numbers(*BANKS)
        if len(numbers) > self.system.whole:
            numbers = sorted(self.nearest(self.encoder.encode_apart([text]), self.system.whole, *BANKS))
        return numbers

    # the online stage: the utilizer

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> list[Memory]:
        now = day_of(query.time)
        working = [self.store.memory(number) for number in self.store.numbers("working")]
        stale = {int(one.id[1:]) for one in working if now and self._aged(one, now)}
        memories = [self.store.memory(number) for number in self._bank(query.text) if number not in stale]
        if not memories:
            return []
        data = {"entries": listed((one.kind, one.text) for one in memories), "question": query.asked}
        value = mapping(self.send(request("utilizer", self.dialogue_id, data))[0])
        used = [memories[n - 1] for n in sorted({*value.get("used", ())}) if 1 <= n <= len(memories)]
        trace["used"] = [one.id for one in used]
        text, when = value.get("profile", "").strip(), used[0].time if used else None
        sources = (source for one in used for source in one.sources or ())
        return [self.written("profile", text, sources, when)] if text else []


def request(role: str, dialogue: str, data: Mapping[str, str]) -> Request:
    """What a role is asked; `data` by its name in the role's template."""
    stage: Stage = "profile" if role == "utilizer" else "memory"
    return from_template(stage, f"salimory_{role}", dialogue, SCHEMAS[role], ROOM[role], data)


def listed(entries: Iterable[tuple[str, str]]) -> str:
    """Entries, store and text, as booster and utilizer see them."""
    return numbered(f"({store}) {text}" for store, text in entries)


def shown(session: Session, turn: Turn) -> dict[str, str]:
    """A turn as the roles see it."""
    return {"time": one_line(turn.time or session.time or "unknown"), "turn": turn_text(turn)}
