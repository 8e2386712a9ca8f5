"""What `membuilder` and `salimory` have in common: the log and the memories agree."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, services, session
from words import WordEncoder

from remind.data.dialogue import Session
from remind.llm.request import Request
from remind.memory.logged import LoggedBank
from remind.memory.systems import make_system

SYSTEMS = ("membuilder", "salimory")


def bank(folder: Path, system: str, chat: ScriptedChat) -> LoggedBank:
    made = make_system(system).open(folder, "d", services(WordEncoder(200), chat))  # type: ignore[arg-type]
    assert isinstance(made, LoggedBank)
    return made


def talk(count: int = 12) -> list[Session]:
    return [
        session(
            f"s{n}", f"2024-01-{1 + n:02}" if n % 5 else None, *(f"Ann: I have thing{n}x{t}." for t in range(n % 4 + 1))
        )
        for n in range(1, count + 1)
    ]


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
@pytest.mark.parametrize("seed", [1, 2])
def test_the_memories_are_the_fold_of_the_log(system: str, seed: int, tmp_path: Path) -> None:
    small_turns = {turn.id for one in talk() for turn in one.turns}
    with bank(tmp_path / "b", system, ScriptedChat(chaos(seed))) as memory:
        for one in talk():
            memory.ingest(one)
            check(memory)
        log = list(memory.operations())
        assert [one.seq for one in log] == list(range(1, len(log) + 1))
        assert {source for one in log for source in one.sources} <= small_turns
        rejected = [one for one in log if one.status == "rejected"]
        assert memory.report()["rejected"] == len(rejected)
        assert rejected
        assert any(one.op == "UPDATE" for one in log)
        # those that nothing could be read of
        assert 0 < memory.report()["lost"] < len(rejected)
