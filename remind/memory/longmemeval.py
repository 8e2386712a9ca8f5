"""LongMemEval's memory design (Sections 4 and 5): values, expanded keys, and queries that know of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any, Literal

from remind.data.dialogue import Session
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, Draft, Query
from remind.memory.expansions import Replaying, Stretch, asked, replay
from remind.memory.plain import cut
from remind.states.pyramid import one_line, turn_lines, turn_text
from remind.text.days import Span, checked, day_of, one_day, spans, time_range

#: By how many days an event may lie outside a range, which is itself often a guess.
TOLERANCE = 2
#: Room for a reply in tokens (Appendix D).
ROOM = 2000
EVENTS = object_schema(
    events={"type": "array", "items": object_schema(message={"type": "integer"}, date=TEXT, event=TEXT)}
)
RANGE = object_schema(start=TEXT, end=TEXT)


@dataclass(frozen=True)
class LongMemEvalSystem(Replaying):
    """LongMemEval's design; the defaults are the settings it recommends (Table 2).

    Keys are made of what the user says, as in the paper; where nobody is called "user" and "assistant", of all turns.

    Attributes:
        name: as the user calls it.
        value: what a memory is.
        expansion: whether facts on the user stand before the words of a turn in its key.
        source: where expansions come from. llm: the endpoint of their stage. replay: `annotations`.
        annotations: LoCoMo's file, for replay.
        time: whether memories outside the time that a question names move behind the others. rules: events and ranges
            from expressions such as "in May" or "last week". llm: from the endpoint.
    """

    rules = "LongMemEval, Appendix D"
    name: str = "lme"
    value: Literal["turn", "round", "session"] = "round"
    expansion: Literal["none", "turn-userfact"] = "turn-userfact"
    source: Literal["llm", "replay"] = "llm"
    time: Literal["none", "rules", "llm"] = "llm"

    @property
    def templates(self) -> tuple[str, ...]:
        facts = ("memory_facts",) if self.expansion != "none" and self.source == "llm" else ()
        return (*facts, *(("memory_events", "memory_time_range") if self.time == "llm" else ()))

    @property
    def not_as_published(self) -> tuple[str, ...]:
        replayed = self.expansion != "none" and self.source == "replay"
        expanded = ["facts are those shipped with LoCoMo"] if replayed else []
        return (*expanded, *(["events and time ranges are found by rules"] if self.time == "rules" else []))


class LongMemEvalBank(Bank, of=LongMemEvalSystem):
    system: LongMemEvalSystem

    def remember(self, session: Session) -> None:
        system = self.system
        roles = {turn.speaker.casefold() for turn in session.turns}
        talk = "user" in roles and roles <= {"user", "assistant", "system"}
        users = tuple(turn for turn in session.turns if not talk or turn.speaker.casefold() == "user")
        found = self._expansions(session, users)
        days = self._days(session)
        drafts = [self._value(part, {turn.id for turn in users}, found) for part in cut(session, system.value)]
        noted = []
        for draft, _ in drafts:
            told = dict.fromkeys(span for turn in draft.sources or () for span in days.get(turn, ()))
            noted.append(replace(draft, note=[[day.isoformat() for day in span] for span in told] or None))
        self.put_all(noted, [text for _, text in drafts])

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        ranked, span = self.store.rank(query.text, "dense"), self._range(query, trace)
        if span is None:
            return ranked
        near = timedelta(days=TOLERANCE)
        told = [
            (number, Span(*map(date.fromisoformat, days)))
            for number in self.store.numbers()
            for days in self.store.note(number) or ()
        ]
        inside = {number for number, own in told if own.start - near <= span.end and span.start <= own.end + near}
        # all are ranked, and the sort is stable: nothing is removed, and either part keeps its order
        return sorted(ranked, key=lambda one: one[0] not in inside)

    def _expansions(self, session: Session, users: Stretch) -> dict[str, list[str]]:
        """The facts of each turn that counts, by its id."""
        system, stretches = self.system, [(turn,) for turn in users]
        if system.expansion == "none":
            return {}
        if system.source == "replay":
            found = replay(system.replayed[self.dialogue_id], session, stretches)
        else:
            found = asked(self, stretches)
        return dict(zip((turn.id for turn in users), found, strict=True))

    def _days(self, session: Session) -> dict[str, list[Span]]:
        """The days that each turn tells of, by its id."""
        if self.system.time == "none":
            return {}
        days = told_days(session, named=self.system.time == "rules")
        if self.system.time == "llm":
            self._ask_events(session, days)
        return days

    def _ask_events(self, session: Session, days: dict[str, list[Span]]) -> None:
        """Add the days that turns name, by an LLM."""
        said = day_of(session.time)
        data = {"messages": "\n".join(f"{n}. {turn_lines(turn)}" for n, turn in enumerate(session.turns, start=1))}
        reply = self.ask("events", "memory_events", data, ROOM, EVENTS, day=_written_day(said, session.time))
        names = list(days)
        for event in mapping(reply).get("events", ()):
            number, named = event["message"], list(spans(event["date"], None))
            # an event of no message may be told of in any
            for name in names[number - 1 : number] if 1 <= number <= len(names) else names:
                days[name] += named

    def _value(self, part: Stretch, users: Set[str], facts: Mapping[str, list[str]]) -> tuple[Draft, str]:
        """A stretch of the session as a memory, and its text, given ids of the user's turns and their facts: a key is
        the facts of a turn and its words (Section 5.2)."""
        sides = [turn for turn in part if turn.id in users] or list(part)
        texts = (" ".join([*dict.fromkeys(facts.get(turn.id, ())), turn_text(turn)]) for turn in sides)
        text = "\n".join(map(turn_lines, part))
        keys = tuple(None if key == text else key for key in dict.fromkeys(texts))
        return Draft(self.system.value, tuple(turn.id for turn in part), keys=keys), text

    def _range(self, query: Query, trace: dict[str, Any]) -> Span | None:
        """The days a question is about."""
        if self.system.time == "none":
            return None
        asked_on, last = day_of(query.time), day_of(self.store.last_time())
        if self.system.time == "rules":
            span = time_range(query.text, asked_on, asked_on or last)
        else:
            span = self._ask_range(query.text, asked_on, asked_on or last)
        trace["range"] = None if span is None else [day.isoformat() for day in span]
        return span

    def _ask_range(self, question: str, asked: date | None, latest: date | None) -> Span | None:
        """`time_range` by an LLM."""
        data = {"question": f"Asked on: {_written_day(asked or latest, None)}\n{one_line(question)}"}
        told = mapping(self.ask("time_range", "memory_time_range", data, ROOM, RANGE))
        found = [span for name in ("start", "end") for span in spans(told.get(name, ""), None)]
        return checked(Span(found[0].start, found[1].end), asked) if len(found) == 2 else None


def told_days(session: Session, named: bool = True) -> dict[str, list[Span]]:
    """For each turn's id the day it was said on and, by rules, the days it names."""
    found = {}
    for turn in session.turns:
        said = day_of(turn.time) or day_of(session.time)
        own = [] if said is None else [one_day(said)]
        found[turn.id] = [*own, *(spans(turn.text, said) if named else ())]
    return found


def _written_day(day: date | None, words: str | None) -> str:
    return f"{day:%Y/%m/%d} ({day:%A})" if day else one_line(words or "unknown")
