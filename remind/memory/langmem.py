"""The package langmem: a manager that calls tools to add, change and delete memories, given the nearest ones."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from remind.core import optional
from remind.data.dialogue import Session, Turn
from remind.memory.base import Draft, Query, turn_lines
from remind.memory.packages import MODEL, NO_KEY, URL, PackageBank, PackageSystem

#: A bank holds one dialogue, and in it the package one namespace.
_SPACE = ("memories",)


@dataclass(frozen=True)
class LangMemSystem(PackageSystem):
    """Memories that the package's manager writes, changes and deletes by tool calls, found by cosine.

    A memory's sources are the turns of the batch that added it and of those that changed it; its time is that of the
    last of these batches.
    """

    not_as_published = ()
    name: str = "langmem"

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ModelError where a package is missing."""
        package = _package()
        instructions = inspect.signature(package.create_memory_store_manager).parameters["instructions"].default
        return self.described("langmem", instructions)


class LangMemBank(PackageBank, of=LangMemSystem):
    """Memories have the numbers of the store for keys in the package's, so that prompts are the same whatever random
    keys it makes."""

    system: LangMemSystem
    # which langmem calls models by
    logger = "trustcall"

    def load(self) -> Any:
        package = _package()
        index = {"dims": self.encoder.dimension, "embed": self._embed}
        store = import_module("langgraph.store.memory").InMemoryStore(index=index)
        for number in self.store.numbers():
            store.put(_SPACE, str(number), self.store.note(number))
        chat = import_module("langchain_openai").ChatOpenAI(
            model=MODEL,
            api_key=NO_KEY,
            base_url=URL,
            max_retries=0,
            temperature=0,
            http_client=self.client(),
            # one that the environment names is refused beside a client
            openai_proxy="",
            use_responses_api=False,
        )
        return package.create_memory_store_manager(chat, namespace=_SPACE, store=store, enable_deletes=True)

    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> None:
        messages, when = import_module("langchain_core.messages"), turns[0].time or session.time
        said = [
            (messages.HumanMessage if self.is_user(turn) else messages.AIMessage)(turn_lines(turn)) for turn in turns
        ]
        if when:
            said.insert(0, messages.SystemMessage(f"This conversation took place on {when}."))
        # an environment that traces LangChain would send dialogues away
        with import_module("langsmith").tracing_context(enabled=False):
            package.invoke({"messages": said})
        self._bring_up(package.store, [turn.id for turn in turns], when)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        return self.store.rank(query.text, "dense")

    def _bring_up(self, theirs: Any, turns: Sequence[str], when: str | None) -> None:
        """Do to the bank's store what was done to the package's."""
        held = {item.key: item.value for item in theirs.search(_SPACE, limit=10**9)}
        for number in self.store.numbers():
            value = held.pop(str(number), None)
            if value is None:
                self.store.remove(number)
            elif value != self.store.note(number):
                sources = (*(self.store.memory(number).sources or ()), *turns)
                self.put(_draft(value, sources, when), number)
        # the package gives them at random
        for key, value in sorted(held.items(), key=lambda item: _indexed(item[1])):
            number = self.put(_draft(value, turns, when))
            theirs.delete(_SPACE, key)
            theirs.put(_SPACE, str(number), value)

    def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [self.encoder.encode_apart([text])[0].tolist() for text in texts]


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
