"""The package langmem: a manager calls tools to add, change and delete memories, given the nearest ones.

What it holds is made anew from the bank's own store for each session, and what the session changed is put back into the
store inside its transaction. So a session is remembered whole or not at all, a killed process leaves nothing
half-written, and no file of the package's own formats is ever read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from remind.core import optional
from remind.core.errors import ConfigError, RemindError
from remind.data.dialogue import Session, Turn
from remind.memory.bank import Bank
from remind.memory.base import Draft, Query, System
from remind.states.pyramid import one_line, turn_lines
from sae.ranges import PositiveInt

#: What the package is told for an address, a key and a model: the meter reads none of them.
_NOWHERE = {"base_url": "http://meter/v1", "api_key": "none", "model": "none"}
#: A bank holds one dialogue, and in it the package one namespace.
_SPACE = ("memories",)


@dataclass(frozen=True)
class LangMemSystem(System):
    """Memories that the package's manager writes, changes and deletes by tool calls, found by cosine as by the package.

    A memory's sources are the turns of the batch that added it and of those that changed it; its time is that of the
    last of these batches.
    """

    provenance = "batch"
    name: str = "langmem"
    batch: PositiveInt = 2
    """Turns that the package is given together; Mem0's authors have 2 in their evaluation on LoCoMo."""

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ModelError where a package is missing."""
        instructions = inspect.signature(_package().create_memory_store_manager).parameters["instructions"].default
        made_of = {"extract": hashlib.sha256(instructions.encode()).hexdigest()[:12]}
        return {**super().about(), "package": f"langmem {metadata.version('langmem')}", "prompt_hashes": made_of}


class LangMemBank(Bank, of=LangMemSystem):
    """Memories have the numbers of the store for keys in the package's, so that prompts are the same whatever random
    keys it makes."""

    system: LangMemSystem

    def remember(self, session: Session) -> None:
        # what it calls models by logs errors in place of raising them
        package, batch, logger = self.load(), self.system.batch, logging.getLogger("trustcall")
        for start in range(0, len(session.turns), batch):
            self._lost = _Lost(logging.ERROR)
            logger.addHandler(self._lost)
            self.asked += 1
            try:
                self._take_in(package, session, session.turns[start : start + batch])
            except (RemindError, sqlite3.Error, OSError):
                # the bank cannot be written
                raise
            except Exception as error:
                # whatever a package raises: the batch is lost, and the session says so
                self._lost.lines = [f"{type(error).__name__}: {error}"]
            finally:
                logger.removeHandler(self._lost)
            # a whole reply may stand in an error
            self.lost += (f"extract: {one_line(line)[:400]}" for line in self._lost.lines)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        return self.store.rank(query.text, "dense")

    def load(self) -> Any:
        """The package with all memories of the store."""
        index = {"dims": self.encoder.dimension, "embed": self._embed}
        store = import_module("langgraph.store.memory").InMemoryStore(index=index)
        for number in self.store.numbers():
            store.put(_SPACE, str(number), self.store.note(number))
        chat = import_module("langchain_openai").ChatOpenAI(
            **_NOWHERE,
            max_retries=0,
            temperature=0,
            http_client=self._client(),
            # one that the environment names is refused beside a client
            openai_proxy="",
            use_responses_api=False,
        )
        return _package().create_memory_store_manager(chat, namespace=_SPACE, store=store, enable_deletes=True)

    def _client(self) -> Any:
        """The run's endpoint as an HTTP client; it notes errors, some of which the package passes over."""
        if self.services.client is None:
            raise ConfigError("langmem needs a chat model; name one: --llm.default.base_url URL")
        client = self.services.client(self.system.name, self.dialogue_id, "extract")

        def note(response: Any) -> None:
            if response.status_code >= 400:
                self._lost.lines.append(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")

        client.event_hooks = {"response": [note]}
        return client

    def _take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> None:
        """Give the package turns of the session and put what changed into the store."""
        messages, when = import_module("langchain_core.messages"), turns[0].time or session.time
        # the speaker of the dialogue's first turn is taken for the user
        user = self.store.sessions()[0].turns[0].speaker
        kinds = [messages.HumanMessage if turn.speaker == user else messages.AIMessage for turn in turns]
        said = [kind(turn_lines(turn)) for kind, turn in zip(kinds, turns, strict=True)]
        if when:
            said.insert(0, messages.SystemMessage(f"This conversation took place on {when}."))
        # an environment that traces LangChain would send dialogues away
        with import_module("langsmith").tracing_context(enabled=False):
            package.invoke({"messages": said})
        theirs, ids = package.store, [turn.id for turn in turns]
        held = {item.key: item.value for item in theirs.search(_SPACE, limit=10**9)}
        for number in self.store.numbers():
            value = held.pop(str(number), None)
            if value is None:
                self.store.remove(number)
            elif value != self.store.note(number):
                sources = (*(self.store.memory(number).sources or ()), *ids)
                self.put(_draft(value, sources, when), number)
        # the package gives them at random
        for key, value in sorted(held.items(), key=lambda item: _indexed(item[1])):
            number = self.put(_draft(value, ids, when))
            theirs.delete(_SPACE, key)
            theirs.put(_SPACE, str(number), value)

    def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [self.encoder.encode_apart([text])[0].tolist() for text in texts]


class _Lost(logging.Handler):
    """What was lost of a batch, a line each; errors that are logged are."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _draft(value: dict[str, Any], sources: Sequence[str], when: str | None) -> Draft:
    """A memory as it is stored here."""
    content = value["content"]
    text = str(content.get("content", "") if isinstance(content, dict) else content)
    return Draft("memory", tuple(sources), text, (_indexed(value),), when, value)


def _indexed(value: dict[str, Any]) -> str:
    """What the package's store encodes of a memory: all of it, as JSON."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _package() -> Any:
    optional("langchain_openai", "langmem")
    return optional("langmem", "langmem")
