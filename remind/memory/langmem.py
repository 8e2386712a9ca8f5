"""The package langmem: a manager that calls tools to add, change and delete memories, given the nearest ones."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from remind.core import optional
from remind.core.errors import ConfigError, ModelError
from remind.data.dialogue import Session, Turn
from remind.memory.packages import MODEL, NO_KEY, PackageBank, PackageSystem
from remind.memory.store import Draft
from remind.states.pyramid import turn_text
from sae.ranges import PositiveInt

if TYPE_CHECKING:
    from remind.llm.request import Stage

#: A bank holds one dialogue, and in it the package one namespace.
_SPACE = ("memories",)
#: More than any namespace holds.
_ALL = 10**9
#: A request that a server which knows tools answers by calling one.
_TRIAL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Call the tool ready."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "ready",
                "description": "Says that tools can be called.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ],
    "tool_choice": "required",
}
#: By which servers say that they do not do what was asked for; others are down, or busy.
_REFUSALS = (400, 404, 422, 501)


@dataclass(frozen=True)
class LangMemSystem(PackageSystem):
    """Memories that the package's manager writes, changes and deletes by tool calls, found by cosine.

    A memory's sources are the turns of the batch that added it and of those that changed it; its time is that of the
    last of these batches.
    """

    not_as_published = ()
    name: str = "langmem"
    query_limit: PositiveInt = 5
    """Memories that the manager is shown with a batch, those nearest to its last turn; the package has 5. With 8 and
    more it looks up the last two turns besides, with 12 and more the last four."""
    deletes: bool = True
    """Whether the manager may delete memories."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_limit < 4:
            raise ConfigError(
                f"query_limit must be at least 4, not {self.query_limit}: below that nothing is looked up"
            )

    def about(self) -> dict[str, Any]:
        """As `MemorySystem.about`. Raises ModelError where a package is missing."""
        package = _package()
        instructions = inspect.signature(package.create_memory_store_manager).parameters["instructions"].default
        return self.described("langmem", instructions)


class LangMemBank(PackageBank, of=LangMemSystem):
    """Memories have the numbers of the store for keys in the package's, so that prompts are the same whatever random
    keys it makes."""

    system: LangMemSystem
    logger = "langmem"
    _tried = False

    def remember(self, session: Session) -> Iterable[str]:
        if not self._tried:
            self._check_tools()
        return super().remember(session)

    def load(self, stage: Stage) -> Any:
        package, client, numbers = _package(), self.client(stage), self.store.numbers()
        vectors = self.store.vectors(self.store.rows(numbers)).tolist() if numbers else []
        values = [self.store.note(number) for number in numbers]
        known = dict(zip(map(_indexed, values), vectors, strict=True))

        def embed(texts: Sequence[str]) -> list[list[float]]:
            new = [text for text in texts if text not in known]
            if new:
                made = client.embeddings.create(model=MODEL, input=new, encoding_format="float").data
                known.update(zip(new, (one.embedding for one in made), strict=True))
            return [known[text] for text in texts]

        index = {"dims": self.encoder.dimension, "embed": embed}
        store = import_module("langgraph.store.memory").InMemoryStore(index=index)
        for number, value in zip(numbers, values, strict=True):
            store.put(_SPACE, str(number), value)
        chat = import_module("langchain_openai").ChatOpenAI(
            model=MODEL,
            api_key=NO_KEY,
            base_url=self.url(stage),
            max_retries=0,
            temperature=0,
            http_client=self.direct(),
            # one that the environment names is refused beside a client
            openai_proxy="",
            use_responses_api=False,
        )
        limits = {"enable_deletes": self.system.deletes, "query_limit": self.system.query_limit}
        return package.create_memory_store_manager(chat, namespace=_SPACE, store=store, **limits)

    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> Iterable[str]:
        messages, first, when = (
            import_module("langchain_core.messages"),
            self.said_first(),
            turns[0].time or session.time,
        )
        said = [
            (messages.HumanMessage if turn.speaker == first else messages.AIMessage)(turn_text(turn)) for turn in turns
        ]
        if when:
            said.insert(0, messages.SystemMessage(f"This conversation took place on {when}."))
        # an environment that traces LangChain would send dialogues away
        with import_module("langsmith").tracing_context(enabled=False):
            puts = package.invoke({"messages": said})
        held = {item.key: item.value for item in package.store.search(_SPACE, limit=_ALL)}
        # the package looks at no errors of its store
        if lost := sum(held.get(put["key"]) != put["value"] for put in puts):
            yield f"{lost} of {len(puts)} memories were not stored"
        self._bring_up(package.store, held, [turn.id for turn in turns], when)

    def search(self, package: Any, text: str, top: int) -> Iterator[tuple[int, float]]:
        for item in package.store.search(_SPACE, query=text, limit=top):
            yield int(item.key), item.score

    def _bring_up(self, theirs: Any, held: dict[str, Any], turns: Sequence[str], when: str | None) -> None:
        """Do to the bank's store what was done to the package's."""
        for number in self.store.numbers():
            value = held.pop(str(number), None)
            if value is None:
                self.store.remove(number)
            elif value != self.store.note(number):
                sources = (*(self.store.memory(number).sources or ()), *turns)
                draft = _draft(value, sources, when)
                self.store.rewrite(number, draft, *self._tokens_and_vectors(draft))
        # the package gives them at random
        for key, value in sorted(held.items(), key=lambda item: _indexed(item[1])):
            draft = _draft(value, turns, when)
            number = self.store.add(draft, *self._tokens_and_vectors(draft))
            theirs.delete(_SPACE, key)
            theirs.put(_SPACE, str(number), value)

    def _tokens_and_vectors(self, draft: Draft) -> tuple[int, Any]:
        return self.encoder.count_tokens(draft.text or ""), self.encoder.encode_apart([_indexed(draft.note)])

    def _check_tools(self) -> None:
        """Ask the server to call a tool; a reply that is cached costs nothing. Raises ModelError where it does not."""
        import openai

        what = f"{self.system.name} needs a chat server with tool calls"
        try:
            reply = self.client("extract").chat.completions.create(model=MODEL, **_TRIAL)
        except openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                said = error.body.get("message") if isinstance(error.body, dict) else None
                raise ModelError(f"{what}: {said or error}") from None
            # a server that is down is reported by the batches that fail
            return
        if not reply.choices or not reply.choices[0].message.tool_calls:
            raise ModelError(f"{what}; asked to call one, the model answered in text")
        self._tried = True


def _draft(value: dict[str, Any], sources: Sequence[str], when: str | None) -> Draft:
    content = value["content"]
    text = str(content.get("content", "") if isinstance(content, dict) else content)
    return Draft("memory", tuple(sources), text, (_indexed(value),), when, value)


def _indexed(value: dict[str, Any]) -> str:
    """What the package's store encodes of a memory: all of it, as JSON."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _package() -> Any:
    optional("langchain_openai", "langmem")
    return optional("langmem", "langmem")
