"""LongMemEval's memory design (Sections 4 and 5): values, expanded keys, and queries that know of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.data.dialogue import Session, Turn
from remind.data.readers.locomo import Annotations, read_annotations
from remind.llm.request import from_template
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Query, Services, System, texts
from remind.memory.plain import cut
from remind.states.pyramid import one_line, turn_lines, turn_text
from remind.text.days import Span, checked, day_of, one_day, spans, time_range

#: By how many days an event may lie outside a range, which is itself often a guess.
TOLERANCE = 2
#: Room for a reply in tokens (Appendix D).
ROOM = 2000
FACTS = object_schema(facts=TEXTS)
EVENTS = object_schema(
    events={"type": "array", "items": object_schema(message={"type": "integer"}, date=TEXT, event=TEXT)}
)
RANGE = object_schema(start=TEXT, end=TEXT)


@dataclass(frozen=True)
class Replaying(System):
    """Base of systems that can take what LoCoMo's file holds in place of what an LLM would write.

    Attributes:
        source: "replay" where they do.
        annotations: LoCoMo's file.
    """

    source: str = "llm"
    annotations: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "replay" and self.annotations is None:
            raise ConfigError("source replay needs LoCoMo's file as annotations")

    @cached_property
    def replayed(self) -> Mapping[str, Annotations]:
        """What the annotations hold, by dialogue."""
        return read_annotations(self.annotations) if self.annotations else {}

    def about(self) -> dict[str, Any]:
        held = None if self.annotations is None else sha256_file(Path(self.annotations))
        return {**super().about(), "annotations": held}

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> Bank:
        if self.source == "replay" and dialogue_id not in self.replayed:
            raise DataError("holds no facts of this dialogue; choose another source", self.annotations, dialogue_id)
        return super().open(folder, dialogue_id, services)


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
        counted, drafts, shown = {turn.id for turn in users}, list[Draft](), list[str]()
        facts, days = self._facts(session, users), self._days(session)
        for part in cut(session, system.value):
            text = "\n".join(map(turn_lines, part))
            # a key is the facts of a turn and its words (Section 5.2)
            sides = [turn for turn in part if turn.id in counted] or part
            told = (" ".join([*dict.fromkeys(facts.get(turn.id, ())), turn_text(turn)]) for turn in sides)
            keys = tuple(None if key == text else key for key in dict.fromkeys(told))
            named = dict.fromkeys(span for turn in part for span in days.get(turn.id, ()))
            note = [[day.isoformat() for day in span] for span in named] or None
            drafts.append(Draft(system.value, tuple(turn.id for turn in part), keys=keys, note=note))
            shown.append(text)
        self.put_all(drafts, shown)

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

    def _facts(self, session: Session, users: Sequence[Turn]) -> Mapping[str, list[str]]:
        """The facts of each turn that counts, by its id: LoCoMo's that are from no turn that the session lacks, or what
        an LLM writes (Appendix D, in our own words)."""
        if self.system.expansion == "none":
            return {}
        if self.system.source == "replay":
            held, there = self.system.replayed[self.dialogue_id], {turn.id for turn in session.turns}
            facts = [(text, ids) for text, ids in held.get(session.id, ()) if there.issuperset(ids)]
            return {turn.id: [text for text, ids in facts if turn.id in ids] for turn in users}
        told = [{"messages": turn_lines(turn)} for turn in users]
        asks = [from_template("facts", "memory_facts", self.dialogue_id, FACTS, ROOM, data) for data in told]
        replies = zip(users, self.send(*asks), strict=True)
        return {turn.id: texts(mapping(reply).get("facts")) for turn, reply in replies}

    def _days(self, session: Session) -> dict[str, list[Span]]:
        """The days that each turn tells of, by its id: the day it was said on and, by rules or an LLM, those named."""
        days: dict[str, list[Span]] = {}
        for turn in session.turns if self.system.time != "none" else ():
            said = day_of(turn.time) or day_of(session.time)
            named = spans(turn.text, said) if self.system.time == "rules" else ()
            days[turn.id] = [*([] if said is None else [one_day(said)]), *named]
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

    def _range(self, query: Query, trace: dict[str, Any]) -> Span | None:
        """The days a question is about."""
        if self.system.time == "none":
            return None
        asked_on, times = day_of(query.time), self.store.rows("SELECT time FROM sessions ORDER BY number DESC")
        latest = asked_on or next(filter(None, (day_of(time) for (time,) in times)), None)
        told = time_range if self.system.time == "rules" else self._ask_range
        span = told(query.text, asked_on, latest)
        trace["range"] = None if span is None else [day.isoformat() for day in span]
        return span

    def _ask_range(self, question: str, asked: date | None, latest: date | None) -> Span | None:
        """`time_range` by an LLM."""
        data = {"question": f"Asked on: {_written_day(asked or latest, None)}\n{one_line(question)}"}
        told = mapping(self.ask("time_range", "memory_time_range", data, ROOM, RANGE))
        found = [span for name in ("start", "end") for span in spans(told.get(name, ""), None)]
        return checked(Span(found[0].start, found[1].end), asked) if len(found) == 2 else None


def _written_day(day: date | None, words: str | None) -> str:
    return f"{day:%Y/%m/%d} ({day:%A})" if day else one_line(words or "unknown")
