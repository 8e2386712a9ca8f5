"""MemBuilder, played by a script: what each role is shown, what becomes of its operations, and the block's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, as_folded, held, opened, parts, session
from words import WordEncoder

from remind.llm.request import Reply, Request
from remind.memory.base import Query
from remind.memory.membuilder import ROLES, MemBuilderSystem

FIRST = session(
    "s1", "2024-03-15", "Ann: I am a nurse. I run at dawn.", "Bob: Nice.", "Ann: I moved to Rome on Monday."
)
LATER = session("s2", "2024-04-01", "Ann: I moved on to Oslo.", "Bob: So soon?")
REPLIES: dict[tuple[str, str], Any] = {
    ("core", "Rome"): {"op": "APPEND", "content": "Ann: a nurse", "sources": [1]},
    ("episodic", "Rome"): {"op": "ADD", "memory": "2024-03-11: Ann moved to Rome | Details: on Monday", "sources": [3]},
    ("semantic", "Rome"): {"op": "ADD", "memory": "Rome - Ann lives there"},
    ("procedural", "Rome"): {"op": "ADD", "memory": "Ann's run | Steps: 1. get up", "sources": [1]},
    ("core", "Oslo"): {"op": "REPLACE", "old_text": "nurse", "new_text": "nurse in Oslo", "sources": [1]},
    ("episodic", "Oslo"): {"op": "UPDATE", "old": 1, "new_memory": "2024-04: Ann moved on to Oslo", "sources": [1]},
    ("semantic", "Oslo"): {"op": "SKIP", "reason": "Oslo is a city", "sources": [1]},
    ("procedural", "Oslo"): {"op": "UPDATE", "old": 2, "new_memory": "none", "sources": [1]},
}


def role_of(request: Request) -> str:
    return request.prompt_id.removeprefix("membuilder_").partition("-")[0]


def scribe(request: Request) -> str:
    place = "Rome" if "Rome" in parts(request)["session"] else "Oslo"
    return json.dumps({"ops": [REPLIES[role_of(request), place]]})


def test_four_roles_read_the_memory_from_before_the_session(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(MemBuilderSystem(), tmp_path / "b", chat, encoder=WordEncoder(200)) as memory:
        memory.ingest(FIRST)
        assert memory.lost == []
        assert [role_of(request) for request in chat.asked] == list(ROLES)
        assert all(parts(one)["session"].startswith("1. Ann: I am a nurse.") for one in chat.asked)
        memory.ingest(LATER)
        core, *others = chat.asked[4:]
        assert parts(core)["block"] == "Ann: a nurse"
        assert "0 % of the block" in core.messages[0].text
        assert [parts(one)["entries"] for one in others][1:] == [
            "1. Rome - Ann lives there",
            "1. Ann's run | Steps: 1. get up",
        ]
        assert parts(others[0])["time"] == "2024-04-01"
        assert held(memory) == {
            "Ann: a nurse in Oslo": None,
            "2024-03-11: Ann moved to Rome | Details: on Monday": ("s1:3",),
            "2024-04: Ann moved on to Oslo": ("s1:3", "s2:1"),
            "Rome - Ann lives there": ("s1:1", "s1:2", "s1:3"),
            "Ann's run | Steps: 1. get up": ("s1:1",),
        }
        as_folded(memory)
        assert memory.report()["rejected"] == 1
        *_, last = memory.operations()
        assert (last.status, last.why) == ("rejected", "no entry 2; 1 are shown")
        assert last.by["prompt"] == chat.asked[-1].prompt_id
        assert [memory.state().entries[name].coarse for name in ("m2", "m3")] == [False, True]
        found = memory.retrieve(Query("Where did Ann move on to?"), k=3).memories
        assert [(one.kind, one.sources) for one in found[:2]] == [("core", None), ("episodic", ("s1:3", "s2:1"))]


@pytest.mark.parametrize(
    ("compressed", "asked", "block"),
    [
        (["Ann: short"], 1, "Ann: short"),
        (["x" * 70, "Ann: shorter"], 2, "Ann: shorter"),
        ([Reply("", failure="server", message="busy")], 1, "Line 3 of many words that fill it"),
    ],
)
def test_a_block_that_is_too_long(compressed: list[Any], asked: int, block: str, tmp_path: Path) -> None:
    lines = "\n".join(f"Line {number} of many words that fill it" for number in range(4))
    left = list(compressed)

    def part(request: Request) -> Any:
        if request.stage == "compress":
            return left.pop(0)
        op = {"op": "APPEND", "content": lines, "sources": [1]}
        return json.dumps({"ops": [op] if role_of(request) == "core" else []})

    chat = ScriptedChat(part)
    system = MemBuilderSystem(block_characters=100, compressed_characters=60)
    with opened(system, tmp_path, chat, FIRST, encoder=WordEncoder(200)) as memory:
        assert chat.stages().count("compress") == asked
        assert list(held(memory)) == [block]
        as_folded(memory)
        assert bool(memory.lost) == isinstance(compressed[0], Reply)
