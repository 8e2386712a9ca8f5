"""A-Mem, played by a script: notes, links, evolution, and the number of calls."""

from __future__ import annotations

import json
from pathlib import Path

from scripted import ScriptedChat, held, opened, parts, session

from remind.llm.request import Request
from remind.memory.amem import AMemSystem

LINES = ("Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
SESSION = session("s1", "2023-05-08", *LINES)
NOTE = {"keywords": ["w"], "context": "About it.", "tags": ["t"]}


def scribe(request: Request) -> str:
    """Links notes on the cat, and gives the older one another context."""
    if request.stage == "summaries":
        return json.dumps(NOTE)
    if request.stage == "read":
        return '{"keywords": ["cat", "name"]}'
    shown = parts(request)
    nearest = [json.loads(line) for line in shown.get("nearest", "").splitlines()]
    cats = [row["id"] for row in nearest if "cat" in row["content"]]
    value = {
        "should_evolve": "cat" in json.loads(shown["note"])["content"] and bool(cats),
        "actions": ["strengthen", "update_neighbor"],
        "suggested_connections": [*cats, 999],
        "tags_to_update": ["pets"],
        "new_context_neighborhood": ["Tom." if row["id"] in cats else row["context"] for row in nearest],
        "new_tags_neighborhood": [["pet"] if row["id"] in cats else row["tags"] for row in nearest],
    }
    return json.dumps(value)


def text(said: str, context: str = "About it.", keywords: str = "w", tags: str = "t") -> str:
    return f"{said}\nContext: {context}\nKeywords: {keywords}\nTags: {tags}"


def test_notes_links_and_calls(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(AMemSystem(), tmp_path / "b", chat) as memory:
        memory.ingest(SESSION)
        assert chat.stages() == ["summaries", "update"] * 3
        assert held(memory) == {
            text(LINES[0], "Tom.", tags="pet"): ("s1:1",),
            text(LINES[1]): ("s1:2",),
            text(LINES[2], tags="pets"): ("s1:3",),
        }
        first, _, last = memory.store.numbers()
        assert memory.store.note(last)["links"] == [first], "the id that is no neighbour's is left out"
