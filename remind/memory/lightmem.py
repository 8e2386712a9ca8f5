"""LightMem (Fang et al., 2025, "LightMem: Lightweight and Efficient Memory-Augmented Generation"): turns are
compressed, cut into topics in a sensory buffer, and collected in a short-term memory; when that is full, facts are
extracted in one call. At the end each is brought up to date by later ones that are like it (sleep-time update).

Stages: extract, update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch

from remind.data.dialogue import Dialogue, Session, Turn
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, Draft, Query, System
from remind.models.encoder import Compressor
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment
from remind.states.pyramid import one_line, turn_lines
from sae.ranges import PositiveInt, PositiveShare, Share

#: Tokens of a reply; the paper names none.
ROOM = {"extract": 2000, "update": 500}
EXTRACT_SCHEMA = object_schema(data={"type": "array", "items": object_schema(source_id={"type": "integer"}, fact=TEXT)})
UPDATE_SCHEMA = object_schema(action={"type": "string", "enum": ["update", "delete", "ignore"]}, new_memory=TEXT)


@dataclass(frozen=True)
class LightMemSystem(System):
    """Facts, each from one turn that the model names, found by cosine. The newest turns are in the buffers until
    `finish`, and no memory yet."""

    templates = ("lightmem_extract", "lightmem_update")
    rules = "zjunlp/LightMem, prompts"
    not_as_published = (
        "topics are cut by sentence vectors alone; the authors also ask the attention of the compressor",
        "turns are compressed only where a compressor is named",
    )
    name: str = "lightmem"
    compressor: str | None = None
    """Folder of an LLMLingua-2 model, which leaves words of each turn out; None: nothing is left out."""
    rate: PositiveShare = 0.7
    """Share of a turn's words that the compressor keeps."""
    sensory: PositiveInt = 512
    """Tokens of the buffer that is cut into topics when it is full."""
    short: PositiveInt = 512
    """Tokens of topics from which facts are extracted in one call."""
    queue: PositiveInt = 10
    """Later entries, at most, that an entry is brought up to date by."""
    update_at: Share = 0.8
    """Cosine from which a later entry is one of them."""

    @cached_property
    def compressing(self) -> Compressor | None:
        """The model of `compressor`, one for all banks."""
        return None if self.compressor is None else Compressor(self.compressor, self.rate)


class Item(NamedTuple):
    """A turn in a buffer: its compressed text, on one line, with the speaker."""

    session: str
    turn: str
    time: str | None
    text: str
    tokens: int


class LightMemBank(Bank, of=LightMemSystem):
    """Each session's journal entry holds both buffers as they are after it, and whether `finish` has emptied them."""

    system: LightMemSystem

    def remember(self, session: Session) -> None:
        sensory, short = self._buffers()
        for item in self._items(session):
            while sensory and _tokens(sensory) + item.tokens > self.system.sensory:
                *topics, rest = self._topics(sensory)
                # the last topic may go on
                sensory = rest if topics else []
                self._collect(topics or [rest], short)
            sensory.append(item)
        self.store.log({"sensory": sensory, "short": short, "finished": False})

    def complete(self) -> None:
        """Extract from what is in the buffers, and bring entries up to date; once for each state of the bank."""
        entries = self.store.journal()
        if not entries or entries[-1]["finished"]:
            return
        sensory, short = self._buffers()
        self.lost = []
        with self.store.transaction():
            self._collect(self._topics(sensory) if sensory else [], short)
            self._extract(short)
            self._update()
            self.store.log({"sensory": [], "short": [], "finished": True})
            last = self.store.sessions()[-1].id
            self.store.degrade(last, (*self.store.degraded().get(last, ()), *self.lost))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        return self.store.rank(query.text, "dense")

    def _buffers(self) -> tuple[list[Item], list[list[Item]]]:
        """The sensory buffer, and the topics in short-term memory."""
        last = (self.store.journal() or [{"sensory": (), "short": ()}])[-1]
        return [Item(*item) for item in last["sensory"]], [[Item(*item) for item in topic] for topic in last["short"]]

    def _items(self, session: Session) -> Iterator[Item]:
        turns = session.turns
        if (compressor := self.system.compressing) is not None:
            turns = tuple(replace(turn, text=compressor.compress(turn.text)) for turn in turns)
        lines = [one_line(turn_lines(turn)) for turn in turns]
        for turn, line, tokens in zip(turns, lines, self.encoder.count_many(lines), strict=True):
            yield Item(session.id, turn.id, turn.time or session.time, line, tokens)

    def _topics(self, items: Sequence[Item]) -> list[list[Item]]:
        """The buffer cut where the topic shifts, and between sessions."""
        sessions = [
            Session(name, None, tuple(Turn(item.turn, "", item.text) for item in part))
            for name, part in groupby(items, key=lambda item: item.session)
        ]
        vectors = self.encoder.encode_apart([item.text for item in items])
        # the buffer itself is the limit to a topic
        config = SegmentConfig(max_tokens=max(self.system.sensory, _tokens(items)))
        parts = segment(Dialogue(self.dialogue_id, tuple(sessions)), vectors, config, [item.tokens for item in items])
        return [list(items[part.start : part.end + 1]) for part in parts]

    def _collect(self, topics: Iterable[list[Item]], short: list[list[Item]]) -> None:
        """Put topics into short-term memory; before one that does not fit, all is extracted from."""
        for topic in topics:
            if sum(map(_tokens, short)) + _tokens(topic) > self.system.short:
                self._extract(short)
            short.append(topic)

    def _extract(self, short: list[list[Item]]) -> None:
        """Facts of all topics, which are gone then."""
        items = [item for topic in short for item in topic]
        if not items:
            return
        lines, number = [], 0
        for place, topic in enumerate(short, start=1):
            lines.append(f"Topic {place}:")
            for item in topic:
                date = f"[{one_line(item.time)}] " if item.time else ""
                lines.append(f"{number}. {date}{item.text}")
                number += 1
        short.clear()
        data = {"remarks": "\n".join(lines)}
        reply = self.ask("extract", "lightmem_extract", data, ROOM["extract"], EXTRACT_SCHEMA)
        for one in mapping(reply).get("data", ()):
            text, source = one_line(one["fact"]), one["source_id"]
            if text and 0 <= source < len(items):
                self.put(Draft("fact", (items[source].turn,), text, time=items[source].time))

    def _update(self) -> None:
        """The updates of each entry by those after it (the paper's update queues), in the order they came. All are
        shown as they were before, so that no decision depends on another."""
        numbers = self.store.numbers()
        if not numbers:
            return
        before = [self.store.memory(number) for number in numbers]
        vectors = self.store.vectors(numbers)
        for place, (number, memory) in enumerate(zip(numbers, before, strict=True)):
            cosines = vectors[place + 1 :] @ vectors[place]
            nearest = torch.argsort(cosines, descending=True, stable=True)[: self.system.queue].tolist()
            later = [before[place + 1 + at] for at in sorted(nearest) if cosines[at] >= self.system.update_at]
            if not later:
                continue
            data = {"entry": memory.dated, "later": "\n".join(one.dated for one in later)}
            value = mapping(self.ask("update", "lightmem_update", data, ROOM["update"], UPDATE_SCHEMA))
            text = one_line(value.get("new_memory", ""))
            if value.get("action") == "delete":
                self.store.remove(number)
            elif value.get("action") == "update" and text:
                sources = tuple(turn for one in (memory, *later) for turn in one.sources or ())
                self.put(Draft("fact", sources, text, time=memory.time), number)


def _tokens(items: Iterable[Item]) -> int:
    return sum(item.tokens for item in items)
