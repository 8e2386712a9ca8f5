"""Mem0 as published (Chhikara et al., 2025, Section 2.1): facts are extracted from each batch of turns; a second call
compares them with similar memories and decides: ADD, UPDATE, DELETE or NONE.

The steps are those of mem0ai 1.0.11, which `tests/memory/test_mem0_official.py` runs beside these. Later versions of
the package only add. Where memories have equal texts, its order among them is not ours.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import object_schema
from remind.memory.asking import TEXT, TEXTS, Fault, Written, ask, failed, send
from remind.memory.base import Bank, Memory, Query
from remind.memory.store import Draft
from remind.states.pyramid import turn_text
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt

#: Tokens of a reply, as the package's clients ask for.
ROOM = 2000
EXTRACT_SCHEMA = object_schema(facts=TEXTS)
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
UPDATE_SCHEMA = object_schema(memory={"type": "array", "items": _ENTRY})
_TODAY = re.compile(r"^- Today's date is .*\n", re.MULTILINE)
_FENCE = re.compile(r"```[a-zA-Z0-9]*\n(.*?)\n```", re.DOTALL)
_ANY_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@dataclass(frozen=True)
class Mem0System(Written):
    """Memories that a chat model extracts and keeps up to date; found by cosine.

    A memory's sources are the turns of the batch that added it and of those that updated it; its time is that of the
    last of these batches.
    """

    templates = ("mem0_extract", "mem0_update")
    provenance = "batch"
    name: str = "mem0"
    batch: PositiveInt = 2
    """Turns that are extracted from together; the authors' evaluation on LoCoMo has 2."""
    similar: PositiveInt = 5
    """Memories that are looked up for a fact before it is decided on; the package has 5, the paper 10."""
    views: Literal["each", "all"] = "each"
    """each: a memory per speaker, about that speaker, as in the authors' evaluation on LoCoMo. all: one for all."""
    prompts: Literal["own", "official"] = "own"
    """official: those of the installed package mem0ai 1.x."""
    dates: Fault = "fixed"
    """What the model takes for the day of the conversation. upstream: the day of ingestion. fixed: the session's."""
    replies: Fault = "fixed"
    """upstream: operations with a number as id, DELETEs without text, UPDATEs of unknown ids, and replies that are no
    JSON are passed over in silence. fixed: ids may be numbers, a DELETE needs no text, such UPDATEs add, and replies
    follow a schema."""

    @property
    def degraded(self) -> list[str]:
        return super().degraded if self.prompts == "own" else []

    def about(self) -> dict[str, Any]:
        """As `MemorySystem.about`. Raises ConfigError where `prompts: official` finds no mem0ai 1.x."""
        if self.prompts == "own":
            return super().about()
        about = {**super().about(), "prompt_hashes": _official_hash()}
        return {**about, "package": f"mem0ai {importlib.metadata.version('mem0ai')}"}


class Mem0Bank(Bank, of=Mem0System):
    system: Mem0System

    def remember(self, session: Session) -> Iterable[str]:
        for start in range(0, len(session.turns), self.system.batch):
            turns = session.turns[start : start + self.system.batch]
            # a batch that a speaker has no line in holds no facts on that speaker
            speakers = dict.fromkeys(turn.speaker for turn in turns)
            for view in speakers if self.system.views == "each" else (None,):
                if problem := self._take_in(session, turns, view):
                    yield problem

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float] | Memory]:
        for number, score in self.ranker.rank(query.text, "dense"):
            view = self.store.note(number)
            if view is None:
                yield number, score
            else:
                # facts on one speaker do not name their subject; the authors show them under the speaker's name
                memory = self.store.memory(number, score)
                text = f"{view}: {memory.text}"
                yield replace(memory, text=text, tokens=self.encoder.count_tokens(text))

    def _take_in(self, session: Session, turns: Sequence[Turn], view: str | None) -> str | None:
        """One batch, in the view of one speaker (None: of all). Returns why it is lost, if it is."""
        reply = self._extract(session, turns, view)
        if reply.failure is not None:
            return failed("extract", reply)
        facts = list(read_facts(self._value(reply)))
        if not facts:
            return None
        vectors = {fact: self._vector(fact) for fact in facts}
        entries = list(dict.fromkeys(number for fact in facts for number in self._similar(vectors[fact], view)))
        reply = self._decide([self.store.memory(number).text for number in entries], facts)
        if reply.failure is not None:
            return failed("update", reply)
        value = self._value(reply)
        operations = value.get("memory") if isinstance(value, Mapping) else None
        known = {str(place): number for place, number in enumerate(entries)}
        when = turns[0].time or session.time
        done = []
        for operation in operations if isinstance(operations, list) else ():
            if isinstance(operation, Mapping):
                done.append(self._apply(operation, known, turns, view, when, vectors))
        self.store.log({"turns": [turn.id for turn in turns], "view": view, "facts": facts, "operations": done})
        return None

    def _similar(self, vector: Tensor, view: str | None) -> Iterator[int]:
        """The nearest memories of the view."""
        found = (number for number, _ in self.store.nearest(vector))
        return islice((number for number in found if self.store.note(number) == view), self.system.similar)

    def _apply(
        self,
        operation: Mapping[str, Any],
        known: dict[str, int],
        turns: Sequence[Turn],
        view: str | None,
        when: str | None,
        vectors: dict[str, Tensor],
    ) -> list[Any]:
        """One operation on the store. Returns what was done: the event ("" for nothing), the memory, its text."""
        fixed = self.system.replies == "fixed"
        text, event, place = operation.get("text"), operation.get("event"), operation.get("id")
        text = text if isinstance(text, str) else ""
        if fixed:
            event, place = str(event).strip().upper(), str(place).strip()
        number = known.get(place) if isinstance(place, str) else None
        if not text and not (fixed and event == "DELETE"):
            return ["", number, text]
        if event == "DELETE" and number is not None:
            self.store.remove(number)
            # later operations of the reply that name it are bad ids
            known.pop(str(place))
            return [event, number, text]
        if event == "UPDATE" and number is None and fixed:
            event = "ADD"
        if event not in ("ADD", "UPDATE") or (event == "UPDATE" and number is None):
            return ["", number, text]
        sources = tuple(turn.id for turn in turns)
        if text not in vectors:
            vectors[text] = self._vector(text)
        tokens, rows = self.encoder.count_tokens(text), vectors[text][None]
        if event == "ADD":
            number = self.store.add(Draft("fact", sources, text, time=when, note=view), tokens, rows)
        elif number is not None:
            sources = (*(self.store.memory(number).sources or ()), *sources)
            self.store.rewrite(number, Draft("fact", sources, text, time=when, note=view), tokens, rows)
        return [event, number, text]

    def _vector(self, text: str) -> Tensor:
        # one at a time: vectors differ in the last bits with the batch they were encoded in
        return self.encoder.encode_apart([text])[0]

    def _extract(self, session: Session, turns: Sequence[Turn], view: str | None) -> Reply:
        day = date.today().isoformat() if self.system.dates == "upstream" else turns[0].time or session.time or ""
        if self.system.prompts == "official":
            lines = [f"{_role(turn, view)}: {turn_text(turn)}\n" for turn in turns]
            # a time in the file's own words is taken whole, an ISO time up to its day
            today = f"- Today's date is {day[:10] if day[:4].isdigit() else day}.\n" if day else ""
            system = _TODAY.sub(lambda _: today, _official().USER_MEMORY_EXTRACTION_PROMPT)
            return self._send("extract", (Message("system", system), Message("user", "Input:\n" + "".join(lines))))
        data = {"person": view or "", "date": day, "conversation": "\n".join(map(turn_text, turns))}
        return ask(self, "extract", "mem0_extract", data, ROOM, self._schema("extract"))

    def _decide(self, entries: Sequence[str], facts: Sequence[str]) -> Reply:
        listed = [{"id": str(place), "text": text} for place, text in enumerate(entries)]
        if self.system.prompts == "official":
            return self._send("update", (Message("user", _official().get_update_memory_messages(listed, facts)),))
        data = {"entries": _json_lines(listed), "facts": _json_lines(facts)}
        return ask(self, "update", "mem0_update", data, ROOM, self._schema("update"))

    def _send(self, stage: Literal["extract", "update"], messages: tuple[Message, ...]) -> Reply:
        name = f"mem0ai-{stage}-{_official_hash()[stage]}"
        return send(self, Request(messages, stage, self.dialogue_id, name, ROOM, schema=self._schema(stage)))

    def _schema(self, stage: Literal["extract", "update"]) -> Mapping[str, Any] | None:
        if self.system.replies == "upstream":
            return None
        return EXTRACT_SCHEMA if stage == "extract" else UPDATE_SCHEMA

    def _value(self, reply: Reply) -> Any:
        return reply.value if self.system.replies == "fixed" else read_loosely(reply.text)


def read_facts(value: Any) -> Iterator[str]:
    """The facts of a reply's JSON: texts, or objects that hold one."""
    listed = value.get("facts") if isinstance(value, Mapping) else None
    for item in listed if isinstance(listed, (list, str, Mapping)) else ():
        text = item.get("fact") or item.get("text") if isinstance(item, Mapping) else str(item)
        if isinstance(text, str) and text:
            yield text


def read_loosely(text: str) -> Any:
    """JSON as the package finds it in a reply: the whole of it or of the one code block, else the first code block,
    else from the first to the last brace. None: there is none."""
    text = without_thoughts(text).strip()
    whole = _FENCE.fullmatch(text)
    body = whole[1].strip() if whole else text
    if not body:
        return None
    inner = _ANY_FENCE.search(text)
    start, end = text.find("{"), text.rfind("}")
    for part in (body, inner[1] if inner else text[start : end + 1] if 0 <= start < end else text):
        try:
            return json.loads(part, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


def _json_lines(items: Iterable[Any]) -> str:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items)


def _role(turn: Turn, view: str | None) -> str:
    return "user" if view in (None, turn.speaker) else "assistant"


@cache
def _official() -> ModuleType:
    """The package's module of prompts, loaded alone: the package itself sets up files and telemetry when imported."""
    try:
        version = importlib.metadata.version("mem0ai")
        package = importlib.util.find_spec("mem0")
    except importlib.metadata.PackageNotFoundError:
        version, package = "", None
    if not version.startswith("1.") or package is None or package.origin is None:
        raise ConfigError(
            f"official prompts of mem0 are those of mem0ai 1.x, not {version or 'installed'}; use own ones"
        )
    spec = importlib.util.spec_from_file_location(
        "mem0_prompts", Path(package.origin).parent / "configs" / "prompts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _official_hash() -> dict[str, str]:
    """Twelve hex digits of each prompt's SHA-256; of the extraction without the day it was loaded on."""
    module = _official()
    parts = {
        "extract": _TODAY.sub("", module.USER_MEMORY_EXTRACTION_PROMPT),
        "update": module.get_update_memory_messages([], []),
    }
    return {stage: hashlib.sha256(text.encode()).hexdigest()[:12] for stage, text in parts.items()}
