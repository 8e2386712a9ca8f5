"""What every system that a chat model manages owes the interface: LightMem, MemoryOS and MemGPT under one script."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_lightmem
import test_memgpt
import test_memoryos
from scripted import ScriptedChat, session
from words import services

from remind.core.errors import DataError
from remind.llm.request import Reply, Request
from remind.memory.base import Bank, Query
from remind.memory.systems import SYSTEMS, make_system
from remind.states import prompts

SESSIONS = (
    session("s1", "2023-05-08", "Ann: My cat is called Tom.", "Bob: Hm.", "Ann: I live in Rome.", "Bob: It is warm."),
    session("s2", "2023-06-01", "Bob: I have a cat, too.", "Ann: Hm.", "Bob: She is old.", "Ann: Tom is young."),
    session("s3", "2023-07-01", "Ann: I moved to Oslo.", "Bob: A cold town."),
)
QUESTIONS = [
    Query(text, str(n)) for n, text in enumerate(("What is the cat called?", "Where does Ann live?", "Who is old?"))
]
#: Small enough that buffers and queues run over.
OPTIONS: dict[str, dict[str, Any]] = {
    "lightmem": {"sensory": 20, "short": 20, "update_at": 0.5},
    "memoryos": {"short": 1, "hot": 2},
    "memgpt": {"batch": 2},
}
SCRIBES: dict[str, Callable[[Request], str | Reply]] = {
    "lightmem": test_lightmem.scribe,
    "memoryos": test_memoryos.scribe,
    "memgpt": test_memgpt.scribe,
}
NAMES = sorted(OPTIONS)


def opened(name: str, folder: Path, chat: ScriptedChat | None = None, **options: Any) -> Bank:
    chat = chat or ScriptedChat(SCRIBES[name])
    system = make_system(name, {**OPTIONS[name], **options})
    return system.open(folder, "d", services(chat))


def filled(name: str, folder: Path, chat: ScriptedChat | None = None, **options: Any) -> Bank:
    bank = opened(name, folder, chat, **options)
    for one in SESSIONS:
        bank.ingest(one)
    bank.finish()
    return bank


@pytest.mark.parametrize("name", NAMES)
def test_a_bank_keeps_what_it_was_given_once(name: str, tmp_path: Path) -> None:
    chat = ScriptedChat(SCRIBES[name])
    with filled(name, tmp_path / "b", chat) as bank:
        assert {*chat.stages()} <= {*SYSTEMS[name].stages}
        content, asked = list(bank.store.dump()), len(chat.asked)
        assert bank.ingest(SESSIONS[0]).known
        bank.finish()
        assert (list(bank.store.dump()), len(chat.asked)) == (content, asked)
        with pytest.raises(DataError, match="other content"):
            bank.ingest(session("s1", "2023-05-08", "Ann: Something else."))
        turns = {turn.id for one in SESSIONS for turn in one.turns}
        found = bank.retrieve(QUESTIONS[0], k=99).memories
        assert found
        assert all(memory.sources and turns.issuperset(memory.sources) for memory in found)
        assert "s1:1" in {turn for memory in found[:1] for turn in memory.sources or ()}
        assert bank.retrieve(QUESTIONS[0], budget=12).tokens <= 12
    # killed between two sessions, and in the middle of one
    with opened(name, tmp_path / "c") as bank:
        bank.ingest(SESSIONS[0])
    dying = ScriptedChat(lambda request: (_ for _ in ()).throw(KeyboardInterrupt))
    with opened(name, tmp_path / "c", dying) as bank, pytest.raises(KeyboardInterrupt):
        for one in SESSIONS[1:]:
            bank.ingest(one)
        bank.finish()
    with filled(name, tmp_path / "c") as bank:
        assert list(bank.store.dump()) == content


@pytest.mark.parametrize("name", NAMES)
def test_what_is_forgotten_was_never_there(name: str, tmp_path: Path) -> None:
    with filled(name, tmp_path / "b") as bank:
        assert bank.forget(["s1:1", "s3:1", "s3:2", "absent"]) == 3
        bank.finish()
        forgotten = list(bank.store.dump())
        assert not any("called Tom" in line for line in forgotten)
    with opened(name, tmp_path / "c") as bank:
        first, second, _ = SESSIONS
        bank.ingest(session("s1", "2023-05-08", *(f"{turn.speaker}: {turn.text}" for turn in first.turns)))
        bank.forget(["s1:1"])
        bank.ingest(second)
        bank.finish()
        assert list(bank.store.dump()) == forgotten


@pytest.mark.parametrize("name", NAMES)
def test_questions_in_another_order_are_answered_the_same(name: str, tmp_path: Path) -> None:
    with filled(name, tmp_path / "b") as bank:
        content = list(bank.store.dump())
        first = {query.id: bank.retrieve(query, k=9).memories for query in QUESTIONS}
        for seed in range(3):
            asked = random.Random(seed).sample(QUESTIONS, len(QUESTIONS))
            assert {query.id: bank.retrieve(query, k=9).memories for query in asked} == first
        assert list(bank.store.dump()) == content


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_model_says_a_session_is_taken_in(name: str, seed: int, tmp_path: Path) -> None:
    """Half of the replies are lost, or no JSON, or JSON of another shape."""
    chance = random.Random(seed)
    odd = ["", "{", '{"data": 5}', "[]", "null", '```json\n{"keywords": ["a"]}\n```']
    lost = Reply("", failure="server", message="no reply")

    def faulty(request: Request) -> str | Reply:
        if chance.random() < 0.5:
            return SCRIBES[name](request)
        if request.body is not None and chance.random() < 0.7:
            call = {"id": 1, "function": {"name": chance.choice(["x", None, "conversation_search"]), "arguments": "{"}}
            message = {"content": chance.choice([None, "x"]), "tool_calls": chance.choice([None, [], [call], [7]])}
            return json.dumps({"choices": [{"message": message}]})
        return lost if request.body is not None else chance.choice([*odd, lost])

    chat = ScriptedChat(faulty)
    with filled(name, tmp_path / "b", chat) as bank:
        assert bank.report()["sessions"] == 3
        for query in QUESTIONS:
            bank.retrieve(query, k=9)
        chat.part = SCRIBES[name]
        degraded = bank.report()["degraded"]
        assert bank.repair() == bool(degraded)
        assert not bank.report()["degraded"]


@pytest.mark.parametrize("name", NAMES)
def test_reports_say_what_it_is_made_of(name: str) -> None:
    about = make_system(name).about()
    own = [path.stem for path in Path(str(prompts.__file__)).parent.glob(f"{name}_*.j2")]
    assert about["prompt_hashes"] == prompts.fingerprints(*own)
    assert about["rules"]
    assert about["degraded"]
    assert about["package"] is None
    assert json.loads(json.dumps(about)) == about
    assert SYSTEMS[name].paper[("multi", "accuracy")] == {"lightmem": 48.3, "memoryos": 41.2, "memgpt": 38.4}[name]
