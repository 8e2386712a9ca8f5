"""MemGPT (Packer et al., 2023, "MemGPT: Towards LLMs as Operating Systems", Section 2): the model tends its own memory
by tools: a core memory that it always sees, an archival memory that it writes, and a recall memory of all turns.

Stages: update (tending the memory), read (answering by tools).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from remind.core.files import sha256_json
from remind.data.dialogue import NO_INFORMATION, Session, Turn
from remind.llm.request import Reply, Request, Stage, code_for, fenced, from_template
from remind.llm.structured import object_schema
from remind.memory.asking import TEXT, Written, asked, dated, failed, send
from remind.memory.base import Bank, Memory, Query, Retrieval
from remind.memory.readers import Answer, Usage
from remind.memory.store import Draft, Method
from remind.states.pyramid import one_line, turn_text
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt

#: The core memory is the first memory of a bank; it has no vector.
_CORE = 1
#: Settings that are not certain to be the authors'.
_CHOICES = (
    "limit, page and room are what we take for the authors' settings; batch and steps are ours",
    "the core memory is one text on all speakers; the persona is part of the prompt",
    "conversation_search ranks by BM25",
)


def _tool(name: str, description: str, needed: Sequence[str], **optional: Any) -> dict[str, Any]:
    schema = {**object_schema(**dict.fromkeys(needed, TEXT), **optional), "required": list(needed)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_PAGE = {"type": "integer", "minimum": 0, "description": "0 for the first results, 1 for those after them, ..."}
SEARCHES = (
    _tool(
        "archival_memory_search", "Find sentences of archival memory that are near in meaning.", ("query",), page=_PAGE
    ),
    _tool(
        "conversation_search", "Find remarks of the conversation that have words of the query.", ("query",), page=_PAGE
    ),
)
EDITS = (
    _tool("core_memory_append", "Add a line to core memory.", ("content",)),
    _tool(
        "core_memory_replace",
        "Put new words in place of words that stand in core memory exactly so; with empty new words they are removed.",
        ("old_content", "new_content"),
    ),
    _tool("archival_memory_insert", "Write a sentence into archival memory; it must be clear alone.", ("content",)),
)


@dataclass(frozen=True)
class MemGPTSystem(Written):
    """What the searches for a question find, then the core memory. The bank answers by itself, by the same searches.

    Sources of a turn are the turn; of a sentence in archival memory the batch that it was written at; of the core
    memory all batches that it was changed at.
    """

    templates = ("memgpt_manage", "memgpt_answer")
    provenance = "turn (recall), batch (archive, core)"
    choices = _CHOICES
    not_as_published = (
        "prompts and descriptions of tools are in our own words",
        "there is no queue of recent messages with a summary: a batch is read with the core memory alone",
        "while a question is answered, memory cannot be changed",
    )
    name: str = "memgpt"
    batch: PositiveInt = 10
    """Turns that are read together."""
    steps: PositiveInt = 5
    """Calls for a batch or a question, at most; in each the model may use several tools."""
    page: PositiveInt = 5
    """Results of a search."""
    limit: PositiveInt = 2000
    """Characters of the core memory."""
    room: PositiveInt = 1024
    """Tokens of a reply."""

    def about(self) -> dict[str, Any]:
        about = super().about()
        about["prompt_hashes"]["tools"] = sha256_json([SEARCHES, EDITS])[:12]
        return about


class ToolError(Exception):
    """A call of a tool that does nothing; the message tells the model why."""


@dataclass
class _Talk:
    """A run of calls.

    Attributes:
        text: what the model said in the end, if it ended.
        used: tools with their arguments.
        found: numbers of the memories that searches brought, in order.
        replies: of all calls.
        problem: why it did not end, if it did not.
    """

    text: str = ""
    used: list[Any] = field(default_factory=list)
    found: dict[int, None] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    problem: str | None = None


class MemGPTBank(Bank, of=MemGPTSystem):
    system: MemGPTSystem

    def remember(self, session: Session) -> Iterable[str]:
        if not self.store.count():
            self.store.add(Draft("core", (), "", ()), 0)
        for start in range(0, len(session.turns), self.system.batch):
            turns = session.turns[start : start + self.system.batch]
            texts = list(map(turn_text, turns))
            head = [f"[{one_line(session.time)}]"] if session.time else []
            data = {"core": self._core.text, "remarks": "\n".join([*head, *map(one_line, texts)])}
            talk = self._talk("update", "memgpt_manage", data, turns, limit=self.system.limit)
            if talk.problem is not None:
                yield talk.problem
            self.store.log({"turns": [turn.id for turn in turns], "used": talk.used})
            vectors, tokens = self.encoder.encode_apart(texts), self.encoder.count_many(texts)
            for turn, vector, count in zip(turns, vectors, tokens, strict=True):
                self.store.add(Draft("turn", (turn.id,)), count, vector[None])

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        if self.store.count():
            talk = self._ask(query)
            trace |= {"used": talk.used, "answer": talk.text}
            if talk.problem is not None:
                trace["failed"] = [talk.problem]
            yield from self._shown(talk)

    def answer(self, query: Query) -> Answer:
        """What the model says after its searches; the retrieval is all that it saw."""
        if not self.store.count():
            return Answer("", None, Retrieval((), ""), Usage(), "the bank is empty")
        talk = self._ask(query)
        memories = tuple(self.store.memory(number, score) for number, score in self._shown(talk))
        return Answer(talk.text, None, Retrieval(memories, ""), Usage.of(talk.replies), talk.problem)

    def _ask(self, query: Query) -> _Talk:
        data = {"core": self._core.text, "question": asked(query)}
        abstention = "" if query.options else NO_INFORMATION
        talk = self._talk("read", "memgpt_answer", data, steps=self.system.steps - 1, abstention=abstention)
        if talk.problem is None and not talk.text:
            talk.problem = f"read: no answer in {len(talk.replies)} calls"
        return talk

    def _shown(self, talk: _Talk) -> Iterator[tuple[int, float]]:
        """What was found, the first best, then the core memory unless it is empty."""
        numbers = [*talk.found, *([_CORE] if self._core.text else [])]
        return ((number, 1 / place) for place, number in enumerate(numbers, start=1))

    @property
    def _core(self) -> Memory:
        return self.store.memory(_CORE)

    def _talk(
        self, stage: Stage, template: str, data: Mapping[str, str], turns: Sequence[Turn] = (), **values: Any
    ) -> _Talk:
        """Call the model, and the tools that it names, until it names none or the steps are used up.

        Args:
            turns: the batch that is read; none while a question is answered, when nothing can be changed and the last
                call allows no tool.
        """
        code = code_for(data.values())
        shown = {name: fenced(name, text, code) if text else "" for name, text in data.items()}
        filled = from_template(stage, template, self.dialogue_id, None, self.system.room, **shown, **values)
        tools = [*SEARCHES, *(EDITS if turns else ())]
        messages: list[dict[str, Any]] = list(filled.chat)
        talk = _Talk()
        for left in reversed(range(self.system.steps)):
            choice = "auto" if left or turns else "none"
            body = {"messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": self.system.room}
            request = Request((), stage, self.dialogue_id, filled.prompt_id, self.system.room, body=body)
            reply = send(self, request)
            talk.replies.append(reply)
            if reply.failure is not None:
                talk.problem = failed(stage, reply)
                break
            message = json.loads(reply.text)["choices"][0]["message"]
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
            said = message.get("content")
            if not calls:
                talk.text = without_thoughts(said).strip() if isinstance(said, str) else ""
                break
            results = [
                {"role": "tool", "tool_call_id": str(call.get("id")), "content": self._use(call, turns, talk)}
                for call in calls
            ]
            messages = [*messages, {"role": "assistant", "content": said, "tool_calls": calls}, *results]
        return talk

    def _use(self, call: Mapping[str, Any], turns: Sequence[Turn], talk: _Talk) -> str:
        """Do what a call asks for, and say what came of it."""
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, given = function.get("name"), function.get("arguments")
        edits: dict[Any, Callable[..., str]] = {
            "core_memory_append": self._append,
            "core_memory_replace": self._replace,
            "archival_memory_insert": self._insert,
        }
        searches: dict[Any, tuple[str, Method]] = {
            "archival_memory_search": ("passage", "dense"),
            "conversation_search": ("turn", "bm25"),
        }
        try:
            try:
                arguments = json.loads(given) if isinstance(given, str) else given
            except (ValueError, RecursionError):
                raise ToolError("the arguments are not JSON") from None
            if not isinstance(arguments, Mapping):
                raise ToolError("the arguments are not a JSON object")
            if name in searches:
                result = self._search(*searches[name], _text(arguments, "query"), arguments.get("page"), talk)
            elif turns and name in edits:
                result = edits[name](arguments, tuple(turn.id for turn in turns))
            else:
                raise ToolError("there is no such tool")
        except ToolError as error:
            result = f"Error: {error}"
        talk.used.append([name, given, result if result.startswith("Error: ") else ""])
        return result

    def _search(self, kind: str, method: Method, query: str, page: Any, talk: _Talk) -> str:
        if page is None:
            page = 0
        if type(page) is not int or not 0 <= page <= self.store.count():
            raise ToolError("page must be a number from 0")
        first = page * self.system.page
        ranked = (
            number
            for number, score in self.ranker.rank(query, method)
            # BM25 ranks those without any of the words, too
            if (method == "dense" or score > 0) and self.store.memory(number).kind == kind
        )
        numbers = list(islice(ranked, first, first + self.system.page))
        if not numbers:
            return "Nothing was found." if not page else "There are no further results."
        talk.found |= dict.fromkeys(numbers)
        lines = "\n".join(one_line(dated(self.store.memory(number))) for number in numbers)
        return fenced("found", lines, code_for([lines]))

    def _append(self, arguments: Mapping[str, Any], turns: tuple[str, ...]) -> str:
        core, content = self._core.text, one_line(_text(arguments, "content"))
        return self._write(f"{core}\n{content}" if core else content, turns)

    def _replace(self, arguments: Mapping[str, Any], turns: tuple[str, ...]) -> str:
        core, old = self._core.text, _text(arguments, "old_content")
        if old not in core:
            raise ToolError("old_content is not in core memory")
        lines = core.replace(old, _text(arguments, "new_content", empty=True)).splitlines()
        return self._write("\n".join(line for line in map(one_line, lines) if line), turns)

    def _write(self, text: str, turns: tuple[str, ...]) -> str:
        if len(text) > self.system.limit:
            raise ToolError(f"core memory would have {len(text)} characters; it holds {self.system.limit}")
        draft = Draft("core", (*(self._core.sources or ()), *turns), text, ())
        self.store.rewrite(_CORE, draft, self.encoder.count_tokens(text))
        return "Core memory is now:\n" + fenced("core", text, code_for([text])) if text else "Core memory is empty."

    def _insert(self, arguments: Mapping[str, Any], turns: tuple[str, ...]) -> str:
        text = one_line(_text(arguments, "content"))
        self.store.add(
            Draft("passage", turns, text), self.encoder.count_tokens(text), self.encoder.encode_apart([text])
        )
        return "It is written down."


def _text(arguments: Mapping[str, Any], name: str, empty: bool = False) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not (empty or value.strip()):
        raise ToolError(f"{name} must be text")
    return value
