"""MemoryOS (Kang et al., 2025, "Memory OS of AI Agent"): the newest exchanges are a short-term queue; what falls out of
it is filed by topic in mid-term segments; segments that grow hot feed a profile and knowledge, which last.

Stages: update (does a page go on with the last one?), summaries (overview, topic), extract (profile, knowledge), read
(keywords of a question).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

from torch import Tensor

from remind.data.dialogue import Session, Turn
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Query, System, texts, words
from remind.states.pyramid import one_line, turn_lines
from remind.text.days import day_of
from sae.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt

CONTINUE_SCHEMA = object_schema(continues={"type": "boolean"})
TOPIC_SCHEMA = object_schema(summary=TEXT, keywords=TEXTS)
KNOWLEDGE_SCHEMA = object_schema(user=TEXTS, assistant=TEXTS)
QUERY_SCHEMA = object_schema(keywords=TEXTS)
#: Whom knowledge is about: the opener of the dialogue, and the others.
SIDES = ("user", "assistant")


@dataclass(frozen=True)
class MemoryOSSystem(System):
    """Pages, each an exchange, and what is known of the speakers. Shown are the short-term queue, the best pages of the
    best segments, knowledge near the question, and the profile."""

    templates = tuple(f"memoryos_{name}" for name in ("continue", "overview", "topic", "profile", "knowledge", "query"))
    provenance = "page; of knowledge and profile the pages they were learned from"
    rules = "BAI-LAB/MemoryOS, prompts"
    not_as_published = ("a question leaves memory as it is, so that heat is pages and recency",)
    name: str = "memoryos"
    short: PositiveInt = 7
    """Pages of the short-term queue."""
    segments: PositiveInt = 200
    """Mid-term segments; before there are more, the coldest is dropped with its pages."""
    similar: FiniteFloat = 0.6
    """Score, cosine of the summaries and Jaccard of the keywords, from which a page joins a segment."""
    hot: PositiveFloat = 5.0
    """Heat, pages not yet learned from + recency, from which profile and knowledge are learned."""
    decay: PositiveFloat = 1e7
    """Seconds in which recency falls to 1/e."""
    knowledge: PositiveInt = 100
    """Facts kept of the user, and as many of the assistant; the oldest are dropped."""
    top_segments: PositiveInt = 5
    """Segments whose pages are looked at for a question."""
    top_pages: PositiveInt = 7
    """Pages of these that are shown."""
    top_knowledge: PositiveInt = 10
    """Facts of each side that are shown."""
    least: NonNegativeFloat = 0.1
    """Score below which a segment is not looked at, and cosine below which a page is not shown."""
    room: PositiveInt = 1000
    """Tokens of a reply."""


@dataclass
class _State:
    """Numbers of memories, oldest first; the last entry of the journal.

    Attributes:
        user: who opened the dialogue.
        short: pages of the queue.
        chain: the last pages that left it and go on with each other.
        segments: of mid-term memory.
        known: facts of each side.
        profile: of the user.
    """

    user: str
    short: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    known: dict[str, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})
    profile: int | None = None


class MemoryOSBank(Bank, of=MemoryOSSystem):
    system: MemoryOSSystem

    def remember(self, session: Session) -> None:
        state = self._state or _State(session.turns[0].speaker)
        for turns in pages(session.turns, state.user):
            said, when = "\n".join(map(turn_lines, turns)), turns[0].time or session.time
            note = {"said": said, "overview": ""}
            state.short.append(self.put(Draft("page", tuple(turn.id for turn in turns), said, (said,), when, note)))
            while len(state.short) > self.system.short:
                self._move(state, state.short.pop(0), day_of(when))
        self.store.log(asdict(state))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        if (state := self._state) is None:
            return
        system = self.system
        reply = self.ask("read", "memoryos_query", {"question": query.text}, system.room, QUERY_SCHEMA)
        keywords = trace["keywords"] = texts(mapping(reply).get("keywords"))
        vector = self.encoder.encode([query.text])[0]
        scores = _best(self._scores(state.segments, vector, keywords), system.top_segments)
        trace["segments"] = [number for number, score in scores if score >= system.least]
        within = [page for number in trace["segments"] for page in self.store.note(number)["pages"]]
        best = _best(self._cosines(within, vector), system.top_pages)
        shown = {number: cosine for number, cosine in best if cosine >= system.least}
        for side in SIDES:
            shown |= dict(_best(self._cosines(state.known[side], vector), system.top_knowledge))
        shown |= self._cosines(state.short, vector)
        yield from _best(shown, len(shown))
        if state.profile is not None:
            yield state.profile, -1.0

    @property
    def _state(self) -> _State | None:
        """None: nothing was ingested."""
        entries = self.store.journal()
        return _State(**entries[-1]) if entries else None

    def _move(self, state: _State, page: int, today: date | None) -> None:
        """A page goes from the queue to the segment of its topic."""
        said, room = self.store.note(page)["said"], self.system.room
        before = ""
        if state.chain:
            last = self.store.note(state.chain[-1])
            data = {"earlier": last["said"], "later": said}
            reply = self.ask("update", "memoryos_continue", data, room, CONTINUE_SCHEMA)
            if mapping(reply).get("continues") is True:
                before = last["overview"]
            else:
                state.chain.clear()
        state.chain.append(page)
        reply = self.ask("summaries", "memoryos_overview", {"before": before, "exchange": said}, room)
        overview = one_line(words(reply)) if reply.failure is None else before
        for number in state.chain:
            part = self.store.note(number)["said"]
            self._change(number, f"{part}\nOverview: {overview}" if overview else part, overview=overview)
        topic = mapping(self.ask("summaries", "memoryos_topic", {"exchange": said}, room, TOPIC_SCHEMA))
        summary = one_line(topic.get("summary", "")) or one_line(said)
        segment = self._file(state, page, summary, texts(topic.get("keywords")), today)
        note = self.store.note(segment)
        if note["fresh"] and self._heat(note, today) >= self.system.hot:
            self._learn(state, note["fresh"])
            self._change(segment, fresh=[])

    def _file(self, state: _State, page: int, summary: str, keywords: list[str], today: date | None) -> int:
        """Put a page into the segment whose topic is most like its own, or into a new one. Returns the segment."""
        (vector,) = self.encoder.encode_apart([summary])
        best = _best(self._scores(state.segments, vector, keywords), 1)
        day = None if today is None else today.isoformat()
        if best and best[0][1] >= self.system.similar:
            number = best[0][0]
            note = self.store.note(number)
            self._change(number, pages=[*note["pages"], page], fresh=[*note["fresh"], page], last=day)
            return number
        while len(state.segments) >= self.system.segments:
            self._drop(state, min(state.segments, key=lambda one: self._heat(self.store.note(one), today)))
        note = {"keywords": keywords, "pages": [page], "fresh": [page], "last": day}
        draft = Draft("segment", self.store.memory(page).sources, summary, (summary,), note=note)
        number = self.put(draft)
        state.segments.append(number)
        return number

    def _drop(self, state: _State, segment: int) -> None:
        pages = self.store.note(segment)["pages"]
        for number in (segment, *pages):
            self.store.remove(number)
        state.segments.remove(segment)
        # the page that is filed now is in no segment yet
        state.chain = [number for number in state.chain if number not in pages]

    def _heat(self, note: Mapping[str, Any], today: date | None) -> float:
        last = day_of(note["last"])
        away = 0 if today is None or last is None else max(0, (today - last).days) * 86_400
        return float(len(note["fresh"]) + math.exp(-away / self.system.decay))

    def _learn(self, state: _State, learned_from: Sequence[int]) -> None:
        """Profile and knowledge of pages that were not learned from yet."""
        told = "\n\n".join(self.store.note(page)["said"] for page in learned_from)
        sources, room = self._sources(learned_from), self.system.room
        data = {"person": one_line(state.user), "exchanges": told}
        old = None if state.profile is None else self.store.memory(state.profile)
        reply = self.ask("extract", "memoryos_profile", {**data, "profile": old.text if old else ""}, room)
        if reply.failure is None and (text := words(reply)):
            draft = Draft("profile", (*((old and old.sources) or ()), *sources), text, ())
            state.profile = self.put(draft, state.profile)
        facts = mapping(self.ask("extract", "memoryos_knowledge", data, room, KNOWLEDGE_SCHEMA))
        for side in SIDES:
            known = state.known[side]
            for fact in texts(facts.get(side)):
                known.append(self.put(Draft("knowledge", sources, fact)))
            while len(known) > self.system.knowledge:
                self.store.remove(known.pop(0))

    def _change(self, number: int, text: str | None = None, **note: Any) -> None:
        """Give a page another text, or a page or segment another note; it is found by what it was."""
        memory, note = self.store.memory(number), {**self.store.note(number), **note}
        sources = self._sources(note["pages"]) if "pages" in note else memory.sources
        key = note.get("said", memory.text)
        self.put(Draft(memory.kind, sources, text or memory.text, (key,), memory.time, note), number)

    def _sources(self, pages: Iterable[int]) -> tuple[str, ...]:
        return tuple(turn for page in pages for turn in self.store.memory(page).sources or ())

    def _scores(self, segments: Sequence[int], vector: Tensor, keywords: Collection[str]) -> dict[int, float]:
        """Of each segment the cosine of its summary with the vector [d] plus the Jaccard index of the keywords."""
        scores = self._cosines(segments, vector)
        mine = {word.casefold() for word in keywords}
        for number in scores:
            its = {word.casefold() for word in self.store.note(number)["keywords"]}
            scores[number] += len(mine & its) / len(mine | its) if mine and its else 0.0
        return scores

    def _cosines(self, numbers: Sequence[int], vector: Tensor) -> dict[int, float]:
        if not numbers:
            return {}
        found = (self.store.vectors(numbers) @ vector).tolist()
        return dict(zip(numbers, found, strict=True))


def pages(turns: Iterable[Turn], user: str) -> Iterator[list[Turn]]:
    """The exchanges of a session: what the user says with the response; either can be alone."""
    waiting: list[Turn] = []
    for turn in turns:
        if turn.speaker == user:
            if waiting:
                yield waiting
            waiting = [turn]
        else:
            yield [*waiting, turn]
            waiting = []
    if waiting:
        yield waiting


def _best(scores: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The highest scores, of equal ones the first."""
    return sorted(scores.items(), key=lambda item: -item[1])[:count]
