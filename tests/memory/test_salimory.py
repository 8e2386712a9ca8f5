"""SaliMory, played by a script: filter, booster and utilizer, and the window of working memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripted import ScriptedChat, as_folded, held, opened, parts, session
from words import WordEncoder

from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.salimory import SaliMorySystem

FIRST = session(
    "s1", "2024-03-01", "Ann: I have a cat, Tom.", "Bob: Ha!", "Ann: I love oat milk.", "Ann: I pack for Rome."
)
SAID: dict[str, list[Any]] = {
    "cat": [{"op": "ADD", "store": "fact", "text": "Ann has a cat, Tom."}],
    "oat": [{"op": "ADD", "store": "preference", "text": "Ann loves oat milk."}],
    "pack": [{"op": "ADD", "store": "working", "text": "Ann packs for Rome."}],
    "dog": [
        {"op": "UPDATE", "store": "fact", "target": 1, "text": "Ann has a cat, Tom, and a dog."},
        {"op": "DELETE", "store": "preference", "target": 2},
        {"op": "DELETE", "store": "fact", "target": 2},
    ],
    "sun": [{"op": "NOOP"}],
}


def role_of(request: Request) -> str:
    return request.prompt_id.removeprefix("salimory_").partition("-")[0]


def scribe(request: Request) -> str:
    shown = parts(request)
    if role_of(request) == "filter":
        return json.dumps({"salient": "Ha!" not in shown["turn"]})
    if role_of(request) == "utilizer":
        return json.dumps({"profile": "Ann has pets.", "used": [1.0, 1, 9]})
    return json.dumps({"ops": next(ops for word, ops in SAID.items() if word in shown["turn"])})


def test_turns_are_filtered_at_once_and_boosted_one_after_the_other(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(SaliMorySystem(), tmp_path / "b", chat, encoder=WordEncoder(200)) as memory:
        memory.ingest(FIRST)
        assert memory.lost == []
        assert [role_of(one) for one in chat.asked] == ["filter"] * 4 + ["booster"] * 3
        assert [parts(one).get("entries") for one in chat.asked[4:]] == [
            None,
            "1. (fact) Ann has a cat, Tom.",
            "1. (fact) Ann has a cat, Tom.\n2. (preference) Ann loves oat milk.",
        ]
        assert held(memory) == {
            "Ann has a cat, Tom.": ("s1:1",),
            "Ann loves oat milk.": ("s1:3",),
            "Ann packs for Rome.": ("s1:4",),
        }
        memory.ingest(session("s2", "2024-03-02", "Ann: We have a dog too.", "Bob: What a sun!"))
        assert held(memory) == {"Ann has a cat, Tom, and a dog.": ("s1:1", "s2:1"), "Ann packs for Rome.": ("s1:4",)}
        assert [(one.op, one.status, one.why) for one in memory.operations()][3:] == [
            ("UPDATE", "applied", ""),
            ("DELETE", "applied", ""),
            ("DELETE", "rejected", "entry m2 is of preference, not of fact"),
            ("NOOP", "applied", ""),
        ]
        # as old as the update
        assert [one.time for one in map(memory.store.memory, memory.store.numbers("fact"))] == ["2024-03-02"]
        as_folded(memory)
        found = memory.retrieve(Query("Which pets has Ann?", time="2024-03-03"), k=5)
        (profile,) = found.memories
        assert (profile.text, profile.kind, profile.sources) == ("Ann has pets.", "profile", ("s1:4",))
        assert found.trace["used"] == ["m3"]
        assert parts(chat.asked[-1]) == {
            "entries": "1. (working) Ann packs for Rome.\n2. (fact) Ann has a cat, Tom, and a dog.",
            "question": "Asked on: 2024-03-03\nWhich pets has Ann?",
        }
