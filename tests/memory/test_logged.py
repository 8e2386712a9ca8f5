"""What `membuilder` and `salimory` have in common: the log and the memories agree, also after kills and forgetting."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from banks import killed_after
from scripted import ScriptedChat, dump, services, session
from words import WordEncoder

from remind.data.dialogue import Session
from remind.llm.request import Request
from remind.memory.logged import LoggedBank
from remind.memory.systems import make_system

SYSTEMS = ("membuilder", "salimory")


def bank(folder: Path, system: str, chat: ScriptedChat | None = None, **options: Any) -> LoggedBank:
    options = {"policy": "extractive" if chat is None else "llm", **options}
    made = make_system(system, options).open(folder, "d", services(WordEncoder(200), chat))  # type: ignore[arg-type]
    assert isinstance(made, LoggedBank)
    return made


def talk(count: int = 12, seed: int = 0) -> list[Session]:
    """Sessions of statements that come again, in other words, as chatter and as questions."""
    draw, told = random.Random(seed), []
    for number in range(1, count + 1):
        lines = []
        for place in range(draw.randint(1, 5)):
            thing, where = draw.choice(["kayak", "piano", "garden"]), draw.choice(["Rome", "Oslo"])
            text = draw.choice(
                [
                    f"I am a {thing} teacher from {where}.",
                    f"I really love my {thing} in {where}.",
                    f"We sold the {thing} near {where} quickly.",
                    f"Tomorrow we fetch the {thing} from {where}.",
                    f"Every morning I clean the {thing} in {where}.",
                    f"Is the {thing} in {where}?",
                    "Ha ha!",
                ]
            )
            lines.append(f"{'Ann' if place % 2 else 'Bob'}: {text}")
        told.append(
            session(f"s{number}", f"2024-{1 + number // 28:02}-{1 + number % 28:02}" if number % 5 else None, *lines)
        )
    return told


def chaos(seed: int) -> Callable[[Request], str]:
    """A model whose replies are right, wrong and no JSON at all."""
    draw = random.Random(seed)

    def reply(request: Request) -> str:
        if "filter" in request.prompt_id:
            return json.dumps({"salient": draw.random() < 0.7})
        if request.stage == "compress":
            return "Ann: short."
        if draw.random() < 0.1:
            return "I would rather not."
        shape = request.schema["properties"]["ops"]["items"]["anyOf"]  # type: ignore[index]
        ops = []
        for _ in range(draw.randint(1, 3)):
            fields = draw.choice(shape)["properties"]
            values: dict[str, Any] = {"op": fields["op"]["const"]}
            for name in set(fields) - {"op"}:
                number = draw.randint(1, 3)
                values[name] = {
                    "sources": [number],
                    "olds": [number, draw.randint(1, 3)],
                    "old": number,
                    "target": number,
                    "store": draw.choice(["fact", "preference", "working"]),
                    "old_text": "Ann",
                }.get(name, f"2024-0{number}: Ann, {draw.random():.3f}")
            ops.append(values)
        return json.dumps({"ops": ops[:1] if "core" in request.prompt_id else ops})

    return reply


def check(memory: LoggedBank) -> None:
    """The memories of the store are those of the fold."""
    state = memory.state()
    wanted = state.kept("episodic", "semantic", "procedural") if memory.keeps_versions else []
    wanted += state.current("core", "fact", "preference", "working")
    held = {one.id: one for one in map(memory.store.memory, memory.store.numbers())}
    assert held.keys() == {one.id for one in wanted}
    for one in wanted:
        there = held[one.id]
        assert (there.kind, there.text) == (one.store, one.text)
        if one.store == "core":
            assert there.sources is None
        else:
            assert set(there.sources or ()) == set(one.sources) != set()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_memories_are_the_fold_of_the_log(system: str, seed: int | None, tmp_path: Path) -> None:
    small_turns = {turn.id for one in talk() for turn in one.turns}
    with bank(tmp_path / "b", system, None if seed is None else ScriptedChat(chaos(seed))) as memory:
        for one in talk():
            memory.ingest(one)
            check(memory)
        log = list(memory.operations())
        assert [one.seq for one in log] == list(range(1, len(log) + 1))
        assert {source for one in log for source in one.sources} <= small_turns
        rejected = [one for one in log if one.status == "rejected"]
        assert memory.report()["rejected"] == len(rejected)
        assert bool(rejected) == (seed is not None)
        assert {one.by["model"] for one in log if one.op != "DELETE"} <= {"extractive", "scripted"}
        assert any(one.op == "UPDATE" for one in log) == (seed is not None)


@pytest.mark.parametrize("system", SYSTEMS)
def test_kills(system: str, tmp_path: Path) -> None:
    told, draw = talk(10), random.Random(4)

    def ingest(memory: Any) -> None:
        for one in told:
            memory.ingest(one)

    with bank(tmp_path / "whole", system) as whole:
        ingest(whole)
        expected = dump(whole)
    kills = 0
    while killed_after(draw.randint(20, 260), lambda: bank(tmp_path / "b", system), ingest):
        kills += 1
        with bank(tmp_path / "b", system) as memory:
            check(memory)
    assert kills > 1
    with bank(tmp_path / "b", system) as memory:
        ingest(memory)
        assert dump(memory) == expected
