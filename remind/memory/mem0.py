"""Mem0 as published (Chhikara et al., 2025, Section 2.1): facts are extracted from each batch of turns; a second call
compares them with similar memories and decides: ADD, UPDATE, DELETE or NONE.

The steps are those of mem0ai 1.0.11, which `tests/memory/test_mem0_official.py` runs beside these. Later versions of
the package only add. Where memories have equal texts, its order among them is not ours.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from itertools import islice
from typing import Any, Literal

from remind.core.errors import ConfigError
from remind.core.files import sha256_file
from remind.data.dialogue import Session, Turn
from remind.llm.request import Message, Reply, Request, Stage
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Memory, Query, System, turn_lines
from remind.text.days import day_of
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
#: What the package's prompt says of the day that it runs on.
_TODAY = re.compile(r"(?<=^- Today's date is ).*(?=\.$)", re.MULTILINE)


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
    prompts: Literal["own", "official"] = "own"
    """official: those of the installed package mem0ai 1.x."""

    @cached_property
    def official(self) -> dict[str, Any]:
        """What the package's module of prompts defines, its path as `__file__`; the package itself sets up files and
        telemetry when imported.

        Raises:
            ConfigError: mem0ai 1.x is not installed.
        """
        found = [one for one in metadata.distributions(name="mem0ai") if one.version.startswith("1.")]
        if not found:
            raise ConfigError("prompts official of mem0 are those of mem0ai 1.x, which is not installed; take own ones")
        return {**runpy.run_path(str(found[0].locate_file("mem0/configs/prompts.py"))), "version": found[0].version}

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ConfigError as `official`."""
        if self.prompts == "own":
            return super().about()
        told = self.official
        hashes = {"mem0ai": sha256_file(told["__file__"])[:12]}
        return {**super().about(), "package": f"mem0ai {told['version']}", "prompt_hashes": hashes}


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
        if self.system.prompts == "official":
            roles = ("user" if turn.speaker == speaker else "assistant" for turn in turns)
            lines = "".join(f"{role}: {turn_lines(turn)}\n" for role, turn in zip(roles, turns, strict=True))
            today = str(day_of(day) or day or "unknown")
            system = _TODAY.sub(lambda _: today, self.system.official["USER_MEMORY_EXTRACTION_PROMPT"])
            return self.pose("extract", Message("system", system), Message("user", f"Input:\n{lines}"))
        data = {"person": speaker, "date": day, "conversation": "\n".join(map(turn_lines, turns))}
        return self.ask("extract", "mem0_extract", data, ROOM, SCHEMAS["extract"])

    def decide(self, entries: Sequence[str], facts: Sequence[str]) -> Reply:
        """What becomes of the memories that are like the facts, and of the facts."""
        listed = [{"id": str(place), "text": text} for place, text in enumerate(entries)]
        if self.system.prompts == "official":
            prompt = self.system.official["get_update_memory_messages"](listed, facts)
            return self.pose("update", Message("user", prompt))
        data = {"entries": _json_lines(listed), "facts": _json_lines(facts)}
        return self.ask("update", "mem0_update", data, ROOM, SCHEMAS["update"])

    def pose(self, stage: Stage, *messages: Message) -> Reply:
        """The reply to messages of the package."""
        request = Request(messages, stage, self.dialogue_id, f"mem0ai_{stage}", ROOM, schema=SCHEMAS[stage])
        return self.send(request)[0]


def _json_lines(items: Iterable[Any]) -> str:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items)
