"""MemGPT, played by a script: what its tools do to the memory, how it answers, and the number of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripted import ScriptedChat, dump, held, opened, session

from remind.llm.request import Request, completion
from remind.memory.base import Query
from remind.memory.memgpt import MemGPTSystem

TALK = session(
    "s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.", "Bob: Hm."
)
FACTS = {
    "I have a cat": "Ann has a cat.",
    "called Tom": "The cat of Ann is called Tom.",
    "in Rome": "Bob lives in Rome.",
}
QUESTION = Query("What is the name of the cat?", "q")


def says(*calls: tuple[Any, Any], text: Any = None) -> str:
    """A completion with calls of tools: name, and arguments as JSON or as they are."""
    made = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
    return json.dumps(completion("m", message, "stop", 10, 5))


def told(request: Request) -> list[str]:
    """What the tools of the last call replied."""
    messages = (request.body or {})["messages"]
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return [message["content"] for message in messages[last + 1 :]]


def seen(request: Request) -> str:
    return str((request.body or {})["messages"][1]["content"])


def scribe(request: Request) -> str:
    """Writes down each fact, and of Ann in core memory; answers from what a search brings."""
    results = told(request)
    if request.stage == "update":
        calls = [("archival_memory_insert", {"content": fact}) for said, fact in FACTS.items() if said in seen(request)]
        if "I have a cat" in seen(request):
            calls.append(("core_memory_append", {"content": "Ann: one cat"}))
        return says(text="done") if results or not calls else says(*calls)
    if not results:
        return says(
            ("conversation_search", {"query": "cat called"}), ("archival_memory_search", {"query": "name of the cat"})
        )
    return says(text="<think>hm</think> Tom" if "called Tom" in results[0] else "nobody")


def test_memories_have_the_batches_that_they_were_written_at(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(MemGPTSystem(batch=2), tmp_path / "b", chat) as memory:
        memory.ingest(TALK)
        assert held(memory) == {
            "Ann: one cat": ("s1:1", "s1:2"),
            "Ann has a cat.": ("s1:1", "s1:2"),
            "Bob lives in Rome.": ("s1:1", "s1:2"),
            "The cat of Ann is called Tom.": ("s1:3", "s1:4"),
            **{f"{turn.speaker}: {turn.text}": (turn.id,) for turn in TALK.turns},
        }
        assert len(chat.asked) == 4
        assert "Ann: one cat" in seen(chat.asked[2]), "the core memory is always seen"


def test_a_question_is_answered_by_searches_and_changes_nothing(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(MemGPTSystem(page=1), tmp_path / "b", chat) as memory:
        memory.ingest(TALK)
        before, asked = dump(memory), len(chat.asked)
        found = memory.retrieve(QUESTION, k=9)
        assert [(one.kind, one.sources) for one in found.memories] == [
            ("turn", ("s1:3",)),
            ("passage", tuple(turn.id for turn in TALK.turns)),
            ("core", tuple(turn.id for turn in TALK.turns)),
        ]
        assert found.trace["answer"] == "Tom"
        given = memory.answer(QUESTION)
        assert (given.text, given.cited, given.failure) == ("Tom", None, None)
        assert given.memories == found.memories
        assert len(chat.asked) == asked + 4
        names = {tool["function"]["name"] for tool in (chat.asked[-1].body or {})["tools"]}
        assert names == {"archival_memory_search", "conversation_search"}
        assert dump(memory) == before
