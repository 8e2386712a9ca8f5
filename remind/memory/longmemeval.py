"""LongMemEval's memory design (Sections 4 and 5): values, expanded keys, and queries that know of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.data.dialogue import Session, Turn
from remind.memory.base import Bank, Query, Services
from remind.memory.expansions import STAGES, Annotations, Kind, Stretch, asked, extractive, read_annotations
from remind.memory.keys import Expansion, Join, join_keys
from remind.memory.plain import cut
from remind.memory.store import Draft, Method
from remind.memory.times import TOLERANCE, Span, ask_events, ask_range, day_of, told_days
from remind.states import prompts
from remind.states.pyramid import turn_text
from sae.ranges import check_ranges

Value = Literal["turn", "round", "session", "fact", "summary"]

_NOT_AS_PUBLISHED = {
    "extractive": "facts, keyphrases and summaries are taken from the dialogue's words and not written by an LLM",
    "replay": "facts and summaries are those shipped with LoCoMo",
}


@dataclass(frozen=True)
class LongMemEvalSystem:
    """LongMemEval's design; the defaults are the settings it recommends (Table 2).

    Keys are made of what the user says, as in the paper; where nobody is called "user" and "assistant", of all turns.

    Attributes:
        name: as the user calls it.
        value: what a memory is. fact, summary: what `expansion` names, which is then no key beside the words.
        expansion: what the keys of turns, rounds and sessions are expanded by.
        join: how words and expansions make keys.
        keys: whether each turn of a value has a key, or all of its words together (the paper's sessions).
        method: how keys are ranked.
        source: where expansions come from. llm: the endpoint of their stage, and where there is none or it fails key
            sentences, which marks the session. replay: `annotations`. extractive: key sentences.
        annotations: LoCoMo's file, for replay.
        time: whether memories outside the time that a question names move behind the others. rules: events and ranges
            from expressions such as "in May" or "last week". llm: from the endpoint, else by rules.
        official_quirks: as in the published code, k counts keys, a stretch of which nothing could be extracted is not
            searched (merge, replace), and summaries and keyphrases of sessions are made of both sides. Its other quirks
            need ids that tell gold: `experiments.memory.published`.

    Raises:
        ConfigError: options that do not fit together.
    """

    name: str = "lme"
    value: Value = "round"
    expansion: Expansion = "turn-userfact"
    join: Join = "merge"
    keys: Literal["turns", "whole"] = "turns"
    method: Method = "dense"
    source: Literal["llm", "replay", "extractive"] = "llm"
    annotations: str | None = None
    time: Literal["none", "rules", "llm"] = "llm"
    official_quirks: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        kind = {"fact": "userfact", "summary": "summ"}.get(self.value, "")
        if not self.expansion.endswith(kind):
            raise ConfigError(f"value {self.value} needs an expansion by {kind}, not {self.expansion}")
        if self.source == "replay" and (self.annotations is None or self.expansion.endswith("keyphrase")):
            raise ConfigError("source replay needs LoCoMo's file as annotations, which has facts and summaries alone")

    @property
    def level(self) -> str:
        """Of what expansions are made: "session", "turn" or "none"."""
        return self.expansion.partition("-")[0]

    @property
    def kind(self) -> Kind | None:
        """What expansions are."""
        return next((kind for kind in STAGES if self.expansion.endswith(kind)), None)

    @cached_property
    def replayed(self) -> Mapping[str, Annotations]:
        """What the annotations hold, by dialogue."""
        return read_annotations(self.annotations) if self.annotations else {}

    def about(self) -> dict[str, Any]:
        stages = [STAGES[self.kind]] if self.kind and self.source == "llm" else []
        names = [*stages, *(("events", "time_range") if self.time == "llm" else ())]
        degraded = [_NOT_AS_PUBLISHED[self.source]] if self.kind and self.source in _NOT_AS_PUBLISHED else []
        if self.time == "rules":
            degraded.append("events and time ranges are found by rules")
        options = asdict(self)
        if self.annotations is not None:
            options["annotations"] = sha256_file(Path(self.annotations))
        shown = {name: prompts.fingerprint(f"memory_{name}") for name in names}
        return {"system": "longmemeval", **options, "prompts": shown, "degraded": degraded}

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> LongMemEvalBank:
        if self.source == "replay" and self.kind and dialogue_id not in self.replayed:
            raise DataError("holds no facts of this dialogue; choose another source", self.annotations, dialogue_id)
        return LongMemEvalBank(folder, dialogue_id, self, services)


class LongMemEvalBank(Bank):
    system: LongMemEvalSystem
    _told: tuple[int, list[tuple[int, Span]]] | None = None

    def remember(self, session: Session) -> Iterable[str]:
        reasons: list[str] = []
        users = tuple(_user_side(session.turns))
        found = self._expansions(session, users, reasons)
        days = self._days(session, reasons)
        if self.system.value == "fact" or self.system.value == "summary":
            drafts = _written(self.system.value, found)
        else:
            names = {turn.id for turn in users}
            own = {turn.id: texts for stretch, texts in found.items() for turn in stretch}
            drafts = [self._value(part, names, own) for part in cut(session, self.system.value)]
        counts = self.encoder.count_many([text for _, text in drafts])
        vectors = self.encoder.encode_apart([key or text for draft, text in drafts for key in draft.keys])
        start = 0
        for (draft, _), count in zip(drafts, counts, strict=True):
            end = start + len(draft.keys)
            told = dict.fromkeys(span for turn in draft.sources or () for span in days.get(turn, ()))
            note = [[day.isoformat() for day in span] for span in told] or None
            self.store.add(replace(draft, note=note), count, vectors[start:end] if end > start else None)
            start = end
        return reasons

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        span = None if self.system.time == "none" else self._range(query, trace)
        if span is None:
            return self._ranked(query.text, k)
        near = timedelta(days=TOLERANCE)
        inside = {
            number for number, told in self._events() if told.start - near <= span.end and span.start <= told.end + near
        }
        # all are ranked, and the sort is stable: nothing is removed, and either part keeps its order
        return sorted(self._ranked(query.text, k), key=lambda ranked: ranked[0] not in inside)

    def _ranked(self, text: str, k: int | None) -> Iterable[tuple[int, float]]:
        if not self.system.official_quirks or k is None:
            return self.ranker.rank(text, self.system.method)
        scores = self.ranker.scores(text, self.system.method)
        found: dict[int, float] = {}
        for place in (-scores).argsort(kind="stable")[:k]:
            found.setdefault(int(self.ranker.owners[place]), float(scores[place]))
        return found.items()

    def _expansions(self, session: Session, users: Stretch, reasons: list[str]) -> dict[Stretch, list[str]]:
        """What is extracted from each stretch: a turn, or all of the session that counts."""
        system, kind = self.system, self.system.kind
        if kind is None:
            return {}
        stretches: list[Stretch] = [(turn,) for turn in users]
        if system.level == "session":
            stretches = [session.turns if system.official_quirks and kind != "userfact" else users]
        chat = self.chat(STAGES[kind]) if system.source == "llm" else None
        if system.source == "replay":
            found = system.replayed[self.dialogue_id].replay(kind, session, stretches)
        elif chat is not None:
            found, failed = asked(chat, kind, self.dialogue_id, session, stretches)
            reasons += failed
        else:
            found = extractive(kind, session, stretches)
            if system.source == "llm":
                reasons.append(f"no endpoint for {STAGES[kind]}: key sentences stand for them")
        return dict(zip(stretches, found, strict=True))

    def _days(self, session: Session, reasons: list[str]) -> dict[str, list[Span]]:
        """The days that each turn tells of, by its id."""
        if self.system.time == "none":
            return {}
        chat = self.chat("events") if self.system.time == "llm" else None
        if chat is not None:
            found, failed = ask_events(chat, self.dialogue_id, session)
            reasons += failed
            return found
        if self.system.time == "llm":
            reasons.append("no endpoint for events: they are found by rules")
        return told_days(session)

    def _value(self, part: Stretch, users: Set[str], own: Mapping[str, list[str]]) -> tuple[Draft, str]:
        """A stretch of the session as a memory, and its text, given ids of the user's turns and texts by turn."""
        system = self.system
        sides = [turn for turn in part if turn.id in users] or list(part)
        keys: dict[str, None] = {}
        for base in [[turn] for turn in sides] if system.keys == "turns" else [sides]:
            found = list(dict.fromkeys(text for turn in base for text in own.get(turn.id, ())))
            # the published code does not search what nothing could be extracted of
            if found or not system.official_quirks or system.kind is None or system.join.endswith("separate"):
                keys |= dict.fromkeys(join_keys("\n".join(map(turn_text, base)), found, system.join))
        text = "\n".join(map(turn_text, part))
        named = tuple(None if key == text else key for key in keys)
        return Draft(system.value, tuple(turn.id for turn in part), keys=named), text

    def _range(self, query: Query, trace: dict[str, Any]) -> Span | None:
        """The days a question is about."""
        asked_on, last = day_of(query.time), day_of(self.store.last_time())
        chat = self.chat("time_range") if self.system.time == "llm" else None
        span, by = ask_range(chat, self.dialogue_id, query.text, asked_on, asked_on or last)
        trace["range"] = {"by": by, "days": None if span is None else [day.isoformat() for day in span]}
        return span

    def _events(self) -> list[tuple[int, Span]]:
        """Numbers of memories with the days they tell of; read once for each state of the bank."""
        if self._told is None or self._told[0] != self.store.version:
            notes = ((number, self.store.note(number) or ()) for number in self.store.numbers())
            found = [(number, Span(*map(date.fromisoformat, days))) for number, note in notes for days in note]
            self._told = self.store.version, found
        return self._told[1]


def _user_side(turns: Iterable[Turn]) -> Iterator[Turn]:
    """What the user says where one talks to an assistant, else everything."""
    turns = list(turns)
    roles = {turn.speaker.casefold() for turn in turns}
    talk = "user" in roles and roles <= {"user", "assistant", "system"}
    return (turn for turn in turns if not talk or turn.speaker.casefold() == "user")


def _written(value: str, own: Mapping[Stretch, list[str]]) -> list[tuple[Draft, str]]:
    """Facts or summaries as memories, and their texts; a fact of several turns is one memory."""
    sources: dict[str, dict[str, None]] = {}
    for stretch, texts in own.items():
        for text in [" ".join(texts)] if value == "summary" and texts else texts:
            sources.setdefault(text, {}).update(dict.fromkeys(turn.id for turn in stretch))
    return [(Draft(value, tuple(ids), text=text), text) for text, ids in sources.items()]
