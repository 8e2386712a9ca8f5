"""Mem0 as published (Chhikara et al., 2025, Section 2.1): facts are extracted from each batch of turns; a second call
compares them with similar memories and decides: ADD, UPDATE, DELETE or NONE.

The steps are those of mem0ai 1.0.11, which `tests/memory/test_mem0_official.py` runs beside these. Later versions of
the package only add. Where memories have equal texts, its order among them is not ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from remind.data.dialogue import Session, Turn
from remind.llm.request import Reply
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Memory, Query, System
from remind.states.pyramid import turn_lines
from sae.ranges import PositiveInt

#: Tokens of a reply, as the package's clients ask for.
ROOM = 2000
_ENTRY: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"anyOf": [TEXT, {"type": "integer"}]},
        "text": TEXT,
        "event": {"type": "string", "enum": ["ADD", "UPDATE", "DELETE", "NONE"]},
    },
    "required": ["id", "event"],
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "extract": object_schema(facts=TEXTS),
    "update": object_schema(memory={"type": "array", "items": _ENTRY}),
}


@dataclass(frozen=True)
class Mem0System(System):
    """Memories that a chat model extracts and keeps up to date, one bank of them for each speaker and on that speaker,
    as in the authors' evaluation on LoCoMo; found by cosine.

    A memory's sources are the turns of the batch that added it and of those that updated it; its time is that of the
    last of these batches.
    """

    templates = ("mem0_extract", "mem0_update")
    rules = "mem0ai 1.0.11, mem0/configs/prompts.py"
    provenance = "batch"
    name: str = "mem0"
    batch: PositiveInt = 2
    """Turns that are extracted from together; the authors' evaluation on LoCoMo has 2."""
    similar: PositiveInt = 5
    """Memories that are looked up for a fact before it is decided on; the package has 5, the paper 10."""


class Mem0Bank(Bank, of=Mem0System):
    system: Mem0System

    def remember(self, session: Session) -> None:
        for start in range(0, len(session.turns), self.system.batch):
            turns = session.turns[start : start + self.system.batch]
            # a batch that a speaker has no line in holds no facts on that speaker
            for speaker in dict.fromkeys(turn.speaker for turn in turns):
                self._take_in(turns, speaker, turns[0].time or session.time)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        for number, score in self.store.rank(query.text, "dense"):
            # facts on one speaker do not name their subject; the authors show them under the speaker's name
            memory = self.store.memory(number, score)
            text = f"{self.store.note(number)}: {memory.text}"
            yield replace(memory, text=text, tokens=self.encoder.count_tokens(text))

    def _take_in(self, turns: Sequence[Turn], speaker: str, when: str | None) -> None:
        """One batch, for the memories on one speaker; lost where a reply is."""
        facts = list(filter(None, mapping(self.extract(turns, speaker, when or "")).get("facts", ())))
        if not facts:
            return
        entries = list(dict.fromkeys(number for fact in facts for number in self._similar(fact, speaker)))
        reply = self.decide([self.store.memory(number).text for number in entries], facts)
        known = {str(place): number for place, number in enumerate(entries)}
        sources, done = tuple(turn.id for turn in turns), []
        for operation in mapping(reply).get("memory", ()):
            text, event, name = operation.get("text", ""), operation["event"], str(operation["id"]).strip()
            number = known.get(name)
            if event == "DELETE" and number is not None:
                self.store.remove(number)
                # later operations of the reply that name it are bad ids
                del known[name]
            elif event in ("ADD", "UPDATE") and text:
                # an UPDATE of what there is not adds
                number = None if event == "ADD" else number
                before = () if number is None else self.store.memory(number).sources or ()
                number = self.put(Draft("fact", (*before, *sources), text, time=when, note=speaker), number)
            else:
                event = ""
            done.append([event, number, text])
        self.store.log({"turns": sources, "speaker": speaker, "facts": facts, "operations": done})

    def _similar(self, fact: str, speaker: str) -> Iterator[int]:
        """The nearest memories on the speaker."""
        ranked = self.store.nearest(self.encoder.encode_apart([fact])[0])
        return islice((number for number, _ in ranked if self.store.note(number) == speaker), self.system.similar)

    def extract(self, turns: Sequence[Turn], speaker: str, day: str) -> Reply:
        """The facts that a batch tells on a speaker."""
        data = {"person": speaker, "date": day, "conversation": "\n".join(map(turn_lines, turns))}
        return self.ask("extract", "mem0_extract", data, ROOM, SCHEMAS["extract"])

    def decide(self, entries: Sequence[str], facts: Sequence[str]) -> Reply:
        """What becomes of the memories that are like the facts, and of the facts."""
        listed = [{"id": str(place), "text": text} for place, text in enumerate(entries)]
        data = {"entries": _json_lines(listed), "facts": _json_lines(facts)}
        return self.ask("update", "mem0_update", data, ROOM, SCHEMAS["update"])


def _json_lines(items: Iterable[Any]) -> str:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items)
