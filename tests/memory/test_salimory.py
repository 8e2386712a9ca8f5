"""SaliMory, played by a script: filter, booster and utilizer, and the window of working memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, held, parts, services, session
from words import WordEncoder

from remind.llm.request import Reply, Request
from remind.memory.base import Query
from remind.memory.salimory import SaliMoryBank, SaliMorySystem

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


def bank(folder: Path, chat: ScriptedChat | None, **options: Any) -> SaliMoryBank:
    return SaliMorySystem(**options).open(folder, "d", services(WordEncoder(200), chat))  # type: ignore[arg-type]


def test_turns_are_filtered_at_once_and_boosted_one_after_the_other(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with bank(tmp_path / "b", chat) as memory:
        assert memory.ingest(FIRST).degraded == ()
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
        found = memory.retrieve(Query("Which pets has Ann?", time="2024-03-03"), k=5)
        (profile,) = found.memories
        assert (profile.text, profile.kind, profile.sources, profile.tokens) == (
            "Ann has pets.",
            "profile",
            ("s1:4",),
            3,
        )
        assert found.trace["used"] == ["m3"]
        assert parts(chat.asked[-1]) == {
            "entries": "1. (working) Ann packs for Rome.\n2. (fact) Ann has a cat, Tom, and a dog.",
            "question": "Asked on: 2024-03-03\nWhich pets has Ann?",
        }


@pytest.mark.parametrize(
    ("days", "left"),
    [
        (["2024-03-01", "2024-03-08"], {"s1:1", "s2:1"}),
        (["2024-03-01", "2024-03-09"], {"s2:1"}),
        ([None, None], {"s1:1", "s2:1"}),
        ([None, None, None], {"s2:1", "s3:1"}),
        (["2024-03-01", None], {"s1:1", "s2:1"}),
    ],
)
def test_the_window_of_working_memory(days: list[str | None], left: set[str], tmp_path: Path) -> None:
    with bank(tmp_path / "b", None, policy="extractive") as memory:
        for number, day in enumerate(days, 1):
            memory.ingest(session(f"s{number}", day, f"Ann: Tomorrow we paint house{number} in Rome{number}."))
        state = memory.state()
        assert {source for one in state.current("working") for source in one.sources} == left
        assert len(state.kept("working")) + len(state.deleted) == len(days)
        gone = [one for one in memory.operations() if one.op == "DELETE"]
        assert len(gone) == len(days) - len(left)
        assert all(one.session == f"s{len(days)}" for one in gone)


@pytest.mark.parametrize(("day", "found"), [("2024-03-08", 2), ("2024-03-09", 1), (None, 2)])
def test_the_window_at_the_question(day: str | None, found: int, tmp_path: Path) -> None:
    with bank(tmp_path / "b", None, policy="extractive") as memory:
        memory.ingest(session("s1", "2024-03-01", "Ann: Tomorrow we paint the house.", "Ann: We sold the car to Tom."))
        assert len(memory.retrieve(Query("What about the house?", time=day), k=5).memories) == found


def test_what_fails_is_made_by_rule(tmp_path: Path) -> None:
    def part(request: Request) -> Any:
        if request.stage == "profile" or "oat" in parts(request)["turn"]:
            return Reply("", failure="server", message="busy")
        return scribe(request)

    with bank(tmp_path / "b", ScriptedChat(part)) as memory:
        assert memory.ingest(FIRST).degraded == (
            "memory: server: busy (filter, s1:3)",
            "memory: server: busy (booster, s1:3)",
        )
        kinds = {one.kind: one.text for one in map(memory.store.memory, memory.store.numbers())}
        assert kinds["preference"] == "2024-03-01: Ann: I love oat milk."
        found = memory.retrieve(Query("Does Ann love oat milk?"), k=1)
        assert found.trace["failed"] == ["profile: server: busy"]
        assert found.memories[0].sources == ("s1:3",)


def test_without_an_endpoint_the_rules_stand_in(tmp_path: Path) -> None:
    with bank(tmp_path / "b", None) as memory:
        assert memory.ingest(FIRST).degraded == ("memory: no endpoint is named",)
        kinds = {one.sources: one.kind for one in map(memory.store.memory, memory.store.numbers())}
        assert kinds == {("s1:1",): "fact", ("s1:3",): "preference", ("s1:4",): "fact"}
        assert memory.retrieve(Query("Who has a cat, Tom?"), k=1).memories[0].sources == ("s1:1",)


def test_of_a_large_bank_the_nearest_entries_are_shown(tmp_path: Path) -> None:
    def part(request: Request) -> str:
        if role_of(request) == "booster":
            return json.dumps({"ops": [{"op": "ADD", "store": "fact", "text": parts(request)["turn"]}]})
        return scribe(request)

    chat = ScriptedChat(part)
    with bank(tmp_path / "b", chat, whole=2) as memory:
        memory.ingest(session("s1", None, *(f"Ann: thing{n} is at place{n}" for n in range(5))))
        memory.retrieve(Query("thing1 and thing3"), k=1)
        assert (
            parts(chat.asked[-1])["entries"] == "1. (fact) Ann: thing1 is at place1\n2. (fact) Ann: thing3 is at place3"
        )


def test_no_profile(tmp_path: Path) -> None:
    chat = ScriptedChat(
        lambda request: '{"profile": " ", "used": []}' if request.stage == "profile" else scribe(request)
    )
    with bank(tmp_path / "b", chat) as memory:
        assert memory.retrieve(Query("Who?"), k=1).memories == ()
        memory.ingest(FIRST)
        assert memory.retrieve(Query("Who?"), k=1).memories == ()
        assert chat.stages().count("profile") == 1
