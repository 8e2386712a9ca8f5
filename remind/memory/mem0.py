"""Mem0 as published (Chhikara et al., 2025, Section 2.1): facts are extracted from each batch of turns; a second call
compares them with similar memories and decides: ADD, UPDATE, DELETE or NONE.

The steps are those of mem0ai 1.0.11, which `tests/memory/test_mem0_official.py` runs beside these. Later versions of
the package only add. Where memories have equal texts, its order among them is not ours.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, failed, filled, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Memory, Query, System
from remind.states.pyramid import turn_text
from sae.ranges import PositiveInt

#: Tokens of a reply, as the package's clients ask for.
ROOM = 2000
_ENTRY: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"anyOf": [TEXT, {"type": "integer"}]},
        "text": TEXT,
        "event": {"type": "string", "enum": ["ADD", "UPDATE", "DELETE", "NONE"]},
        "old_memory": TEXT,
    },
    "required": ["id", "event"],
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "extract": object_schema(facts=TEXTS),
    "update": object_schema(memory={"type": "array", "items": _ENTRY}),
}
_TODAY = re.compile(r"^- Today's date is .*\n", re.MULTILINE)


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

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ConfigError where `prompts: official` finds no mem0ai 1.x."""
        if self.prompts == "own":
            return super().about()
        _official()
        return {**super().about(), "prompt_hashes": {}, "package": f"mem0ai {importlib.metadata.version('mem0ai')}"}


class Mem0Bank(Bank, of=Mem0System):
    system: Mem0System

    def remember(self, session: Session) -> None:
        for start in range(0, len(session.turns), self.system.batch):
            turns = session.turns[start : start + self.system.batch]
            # a batch that a speaker has no line in holds no facts on that speaker
            for speaker in dict.fromkeys(turn.speaker for turn in turns):
                reply = self._take_in(turns, speaker, turns[0].time or session.time)
                if reply.failure is not None:
                    self.lost.append(failed("mem0", reply))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        for number, score in self.store.rank(query.text, "dense"):
            # facts on one speaker do not name their subject; the authors show them under the speaker's name
            memory = self.store.memory(number, score)
            text = f"{self.store.note(number)}: {memory.text}"
            yield replace(memory, text=text, tokens=self.encoder.count_tokens(text))

    def _take_in(self, turns: Sequence[Turn], speaker: str, when: str | None) -> Reply:
        """One batch, for the memories on one speaker. Returns the last reply; where it failed, the batch is lost."""
        reply = self._extract(turns, speaker, when or "")
        facts = list(filter(None, mapping(reply).get("facts", ())))
        if not facts:
            return reply
        entries = list(dict.fromkeys(number for fact in facts for number in self._similar(fact, speaker)))
        reply = self._decide([self.store.memory(number).text for number in entries], facts)
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
        return reply

    def _similar(self, fact: str, speaker: str) -> Iterator[int]:
        """The nearest memories on the speaker."""
        ranked = self.store.nearest(self.encoder.encode_apart([fact])[0])
        return islice((number for number, _ in ranked if self.store.note(number) == speaker), self.system.similar)

    def _extract(self, turns: Sequence[Turn], speaker: str, day: str) -> Reply:
        said = list(map(turn_text, turns))
        if self.system.prompts == "own":
            return self._ask("extract", {"person": speaker, "date": day, "conversation": "\n".join(said)})
        roles = ("user" if turn.speaker == speaker else "assistant" for turn in turns)
        lines = "".join(f"{role}: {text}\n" for role, text in zip(roles, said, strict=True))
        # a time in the file's own words is taken whole, an ISO time up to its day
        today = f"- Today's date is {day[:10] if day[:4].isdigit() else day}.\n" if day else ""
        system = _TODAY.sub(lambda _: today, _official()["USER_MEMORY_EXTRACTION_PROMPT"])
        return self._send("extract", Message("system", system), Message("user", f"Input:\n{lines}"))

    def _decide(self, entries: Sequence[str], facts: Sequence[str]) -> Reply:
        listed = [{"id": str(place), "text": text} for place, text in enumerate(entries)]
        if self.system.prompts == "own":
            return self._ask("update", {"entries": _json_lines(listed), "facts": _json_lines(facts)})
        return self._send("update", Message("user", _official()["get_update_memory_messages"](listed, facts)))

    def _ask(self, stage: Literal["extract", "update"], data: Mapping[str, str]) -> Reply:
        return self.send(filled(self.dialogue_id, stage, f"mem0_{stage}", data, ROOM, SCHEMAS[stage]))[0]

    def _send(self, stage: Literal["extract", "update"], *messages: Message) -> Reply:
        request = Request(messages, stage, self.dialogue_id, f"mem0ai-{stage}", ROOM, schema=SCHEMAS[stage])
        return self.send(request)[0]


def _json_lines(items: Iterable[Any]) -> str:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items)


@cache
def _official() -> dict[str, Any]:
    """What the package's module of prompts defines; the package itself sets up files and telemetry when imported."""
    spec = importlib.util.find_spec("mem0")
    version = importlib.metadata.version("mem0ai") if spec else "installed"
    if spec is None or spec.origin is None or not version.startswith("1."):
        raise ConfigError(f"official prompts of mem0 are those of mem0ai 1.x, not {version}; use own ones")
    return runpy.run_path(str(Path(spec.origin).parent / "configs" / "prompts.py"))
