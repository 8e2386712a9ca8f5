"""Mem0's four operations, played by a script: what is kept, where it comes from, what is asked, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, held, opened, parts, session

from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.mem0 import Mem0System
from remind.models.encoder import SentenceEncoder

FIRST = session("s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
LATER = session("s2", "2023-06-01", "Ann: Tom the cat ran away.", "Bob: I moved to Oslo.")
#: What a perfect manager takes from each line.
FACTS = {
    "I have a cat.": "Ann has a cat",
    "I live in Rome.": "Bob lives in Rome",
    "The cat is called Tom.": "Ann has a cat called Tom",
    "Tom the cat ran away.": "Ann has no cat any more",
    "I moved to Oslo.": "Bob lives in Oslo",
}


def scribe(request: Request) -> str:
    """Keeps the known facts: a longer one updates, a contradiction deletes, a move updates."""
    shown = parts(request)
    if request.stage == "extract":
        said = [line.split(": ", 1) for line in shown["conversation"].splitlines()]
        about = shown.get("person")
        return json.dumps({"facts": [FACTS[text] for who, text in said if about in (None, who)]})
    entries = {row["text"]: row["id"] for row in map(json.loads, shown.get("entries", "").splitlines())}
    operations = []
    for fact in map(json.loads, shown["facts"].splitlines()):
        old = {"Ann has a cat called Tom": "Ann has a cat", "Bob lives in Oslo": "Bob lives in Rome"}.get(fact)
        if fact == "Ann has no cat any more":
            operations.append({"id": entries["Ann has a cat called Tom"], "event": "DELETE"})
        elif old in entries:
            operations.append({"id": entries[old], "text": fact, "event": "UPDATE", "old_memory": old})
        else:
            operations.append({"id": str(len(entries)), "text": fact, "event": "ADD"})
    return json.dumps({"memory": operations})


def test_operations_provenance_and_calls(encoder: SentenceEncoder, tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(Mem0System(), tmp_path / "b", chat) as memory:
        memory.ingest(FIRST)
        assert held(memory) == {
            "Ann has a cat called Tom": ("s1:1", "s1:2", "s1:3"),
            "Bob lives in Rome": ("s1:1", "s1:2"),
        }
        # two speakers in the first batch, one in the second; each has facts, so each is asked twice
        assert chat.stages() == ["extract", "update"] * 3
        first = memory.store.numbers()
        memory.ingest(LATER)
        assert held(memory) == {"Bob lives in Oslo": ("s1:1", "s1:2", "s2:1", "s2:2")}
        assert set(memory.store.numbers()) < set(first), "an update keeps its memory's number"
        (found,) = memory.retrieve(Query("Where does Bob live?"), k=3).memories
        assert (found.text, found.time) == ("Bob: Bob lives in Oslo", "2023-06-01")
        assert found.tokens == encoder.count_tokens(found.text)
        events = [operation[0] for entry in memory.store.journal() for operation in entry["operations"]]
        assert events == ["ADD", "ADD", "UPDATE", "DELETE", "UPDATE"]


@pytest.mark.parametrize(
    ("operations", "kept"),
    [
        ([{"id": 0, "text": "new", "event": "UPDATE"}], {"new": ("s1:1", "s2:1")}),
        ([{"id": "9", "text": "new", "event": "UPDATE"}], {"old": ("s1:1",), "new": ("s2:1",)}),
        ([{"id": "0", "text": "new", "event": "NONE"}], {"old": ("s1:1",)}),
        ([{"id": "0", "event": "DELETE"}] * 2, {}),
    ],
)
def test_operations_of_a_reply(operations: Any, kept: Any, encoder: SentenceEncoder, tmp_path: Path) -> None:
    def play(request: Request) -> str:
        if request.stage == "extract":
            return '{"facts": ["fact"]}'
        added = [{"id": "0", "text": "old", "event": "ADD"}]
        return json.dumps({"memory": operations if parts(request).get("entries") else added})

    with opened(Mem0System(), tmp_path / "b", ScriptedChat(play)) as memory:
        memory.ingest(session("s1", None, "Ann: One."))
        memory.ingest(session("s2", None, "Ann: Two."))
        assert held(memory) == kept
