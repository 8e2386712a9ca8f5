"""MemGPT (Packer et al., 2023, "MemGPT: Towards LLMs as Operating Systems", Section 2): the model tends its own memory
by tools: a core memory that it always sees, an archival memory that it writes, and a recall memory of all turns.

Stages: update (tending the memory), read (answering by tools).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from remind.data.dialogue import NO_INFORMATION, Session, Turn
from remind.llm.request import Reply, Stage, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema, read_value
from remind.memory.bank import Bank, Method
from remind.memory.base import TEXT, Draft, Memory, Query, System, words
from remind.states.pyramid import one_line, turn_lines
from sae.ranges import PositiveInt

#: The core memory is the first memory of a bank; it has no vector.
_CORE = 1
_SAID = {"type": "string", "pattern": r"\S"}
_PAGE = {"type": "integer", "minimum": 0, "description": "0, the default, for the first results, 1 for the next, ..."}
_SEARCH = {**object_schema(query=_SAID, page=_PAGE), "required": ["query"]}
#: What each tool is for, and its arguments; the first two only look things up.
TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "archival_memory_search": ("Search archival memory by meaning.", _SEARCH),
    "conversation_search": ("Search the remarks of the whole conversation by their words.", _SEARCH),
    "core_memory_append": ("Add a line to core memory.", object_schema(content=_SAID)),
    "core_memory_replace": (
        "Put new words in place of words of core memory, which must stand there exactly so. Empty new words delete.",
        object_schema(old_content=_SAID, new_content=TEXT),
    ),
    "archival_memory_insert": (
        "Add to archival memory; phrase it so that it can be found by a query later.",
        object_schema(content=_SAID),
    ),
}
#: Kind of the memories that a search looks through, and how.
_SEARCHED: Mapping[str, tuple[str, Method]] = {
    "archival_memory_search": ("passage", "dense"),
    "conversation_search": ("turn", "bm25"),
}


@dataclass(frozen=True)
class MemGPTSystem(System):
    """What the searches for a question find, then the core memory.

    Sources of a turn are the turn; of a sentence in archival memory the batch that it was written at; of the core
    memory all batches that it was changed at.
    """

    templates = ("memgpt_manage", "memgpt_answer")
    rules = "cpacker/MemGPT, memgpt_chat and its functions"
    provenance = "turn (recall), batch (archive, core)"
    not_as_published = (
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


@dataclass
class _Talk:
    """A run of calls.

    Attributes:
        text: what the model said in the end, if it ended.
        used: tools with their arguments, and why they did nothing.
        found: numbers of the memories that searches brought, in order.
    """

    text: str = ""
    used: list[Any] = field(default_factory=list)
    found: dict[int, None] = field(default_factory=dict)


class MemGPTBank(Bank, of=MemGPTSystem):
    system: MemGPTSystem

    def remember(self, session: Session) -> None:
        if not self.store.count():
            self.store.add(Draft("core", (), "", ()), 0)
        for start in range(0, len(session.turns), self.system.batch):
            turns = session.turns[start : start + self.system.batch]
            head = [f"[{one_line(session.time)}]"] if session.time else []
            remarks = "\n".join([*head, *(one_line(turn_lines(turn)) for turn in turns)])
            data = {"core": self._core.text, "remarks": remarks}
            talk = self._talk("update", "memgpt_manage", data, turns, limit=self.system.limit)
            self.store.log({"turns": [turn.id for turn in turns], "used": talk.used})
            self.put_turns(turns)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        if self.store.count():
            data = {"core": self._core.text, "question": query.asked}
            abstention = "" if query.options else NO_INFORMATION
            talk = self._talk("read", "memgpt_answer", data, steps=self.system.steps - 1, abstention=abstention)
            trace |= {"used": talk.used, "answer": talk.text}
            # what was found, the first best
            numbers = [*talk.found, *([_CORE] if self._core.text else [])]
            yield from ((number, 1 / place) for place, number in enumerate(numbers, start=1))

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
        request = from_template(stage, template, self.dialogue_id, None, self.system.room, data, **values)
        messages: list[dict[str, Any]] = [*request.chat]
        tools = [
            {"type": "function", "function": {"name": name, "description": told, "parameters": arguments}}
            for name, (told, arguments) in TOOLS.items()
            if turns or name in _SEARCHED
        ]
        talk = _Talk()
        for left in reversed(range(self.system.steps)):
            choice = "auto" if left or turns else "none"
            body = {"messages": [*messages], "tools": tools, "tool_choice": choice, "max_tokens": self.system.room}
            (reply,) = self.send(replace(request, messages=(), body=body))
            if reply.failure is not None:
                break
            try:
                message = json.loads(reply.text)["choices"][0]["message"]
                said, calls = message.get("content"), message.get("tool_calls") or ()
                functions = [(call["function"]["name"], str(call["function"]["arguments"])) for call in calls]
            except (LookupError, TypeError):
                self.lost.append(f"{stage}: the reply is no message as the protocol has it")
                break
            if not calls:
                talk.text = words(Reply(said or ""))
                break
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            for call, (name, given) in zip(calls, functions, strict=True):
                result = self._use(name, given, turns, talk)
                messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": result})
        return talk

    def _use(self, name: str, given: str, turns: Sequence[Turn], talk: _Talk) -> str:
        """Do what a call asks for, and say what came of it."""
        sources = tuple(turn.id for turn in turns)
        try:
            if name not in TOOLS or not (turns or name in _SEARCHED):
                raise NotValid("there is no such tool")
            arguments = read_value(given, TOOLS[name][1])
            if name in _SEARCHED:
                result = self._search(name, arguments["query"], arguments.get("page", 0), talk)
            elif name == "archival_memory_insert":
                self.put(Draft("passage", sources, one_line(arguments["content"])))
                result = "It is written down."
            elif name == "core_memory_append":
                result = self._write(f"{self._core.text}\n{one_line(arguments['content'])}", sources)
            elif arguments["old_content"] not in self._core.text:
                raise NotValid("old_content is not in core memory")
            else:
                text = self._core.text.replace(arguments["old_content"], arguments["new_content"])
                result = self._write(text, sources)
            talk.used.append([name, given, ""])
            return result
        except NotValid as error:
            talk.used.append([name, given, str(error)])
            return f"Error: {error}"

    def _search(self, name: str, query: str, page: int, talk: _Talk) -> str:
        kind, method = _SEARCHED[name]
        first = page * self.system.page
        ranked = (
            number
            for number, score in self.store.rank(query, method)
            # BM25 ranks those without any of the words, too
            if (method == "dense" or score > 0) and self.store.memory(number).kind == kind
        )
        numbers = list(islice(ranked, first, first + self.system.page))
        if not numbers:
            return "There are no further results." if page else "Nothing was found."
        talk.found |= dict.fromkeys(numbers)
        lines = "\n".join(one_line(self.store.memory(number).dated) for number in numbers)
        return fenced("found", lines, code_for([lines]))

    def _write(self, text: str, sources: tuple[str, ...]) -> str:
        """Put a text in place of the core memory."""
        text = "\n".join(line for line in map(one_line, text.splitlines()) if line)
        if len(text) > self.system.limit:
            raise NotValid(f"core memory would have {len(text)} characters; it holds {self.system.limit}")
        self.put(Draft("core", (*(self._core.sources or ()), *sources), text, ()), _CORE)
        return "Core memory is now:\n" + fenced("core", text, code_for([text])) if text else "Core memory is empty."
