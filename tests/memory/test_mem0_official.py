"""Mem0 against the package mem0ai 1.0.11 under one scripted model: memories, provenance, prompts."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, services

from remind.data.dialogue import Dialogue, Session, Turn
from remind.data.readers import read
from remind.llm.request import Message, Reply, Request
from remind.memory.mem0 import ROOM, SCHEMAS, Mem0Bank, Mem0System
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import turn_text

try:
    INSTALLED = importlib.metadata.version("mem0ai")
except importlib.metadata.PackageNotFoundError:
    INSTALLED = ""

pytestmark = pytest.mark.skipif(INSTALLED != "1.0.11", reason="needs mem0ai==1.0.11")
TURNS = 200
#: What the package's prompt says of the day that it runs on.
_TODAY = re.compile(r"(?<=^- Today's date is ).*(?=\.$)", re.MULTILINE)
_LISTS = re.compile(r"```\n    (\[.*?\])\n    ```", re.DOTALL)


def play(messages: list[dict[str, str]], seen: dict[str, int]) -> str:
    """A reply that depends on the prompt alone; counts which branch it took."""
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
    rng = random.Random(digest)
    if len(messages) == 2:
        value = extraction(messages[1]["content"], rng, digest)
    else:
        lists = [ast.literal_eval(text) for text in _LISTS.findall(messages[0]["content"])]
        facts, entries = lists[-1], lists[0] if len(lists) > 1 else []
        value = {"memory": list(decisions(facts, entries, rng, digest, seen))}
    body = json.dumps(value)
    return f"<think>well {{</think>```json\n{body}\n```" if rng.random() < 0.8 else body[:-3]


def extraction(text: str, rng: random.Random, digest: str) -> dict[str, Any]:
    lines = [line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("user: ")]
    facts: list[Any] = [f"{line[:70]} #{digest[:6]}" for line in lines if rng.random() < 0.9]
    if rng.random() < 0.3:
        facts = [{rng.choice(["fact", "text"]): fact} for fact in facts]
    return {"facts": [*facts, *([""] if rng.random() < 0.2 else [])]}


def decisions(
    facts: list[str], entries: list[dict[str, str]], rng: random.Random, digest: str, seen: dict[str, int]
) -> Iterator[Any]:
    """Operations that the package does, and some that neither does; what it loses by a fault is left out."""
    ids = [one["id"] for one in entries]
    for place, fact in enumerate(facts):
        kind = rng.choice(["ADD"] * 4 + ["UPDATE", "UPDATE", "DELETE", "NONE", "bad id", "no text"])
        if not ids and kind in ("UPDATE", "DELETE", "NONE", "no text"):
            kind = "ADD"
        seen[kind] = seen.get(kind, 0) + 1
        # each entry once: the package takes one that it has deleted for one that there is
        known = ids.pop(rng.randrange(len(ids))) if kind not in ("ADD", "bad id") else ""
        yield {
            "ADD": {"id": str(len(entries) + place), "text": rng.choice([fact, f"{fact} ({place})"]), "event": "ADD"},
            "UPDATE": {"id": known, "text": f"{fact} now {digest[6:10]}", "event": "UPDATE", "old_memory": "x"},
            "DELETE": {"id": known, "text": fact, "event": "DELETE"},
            "NONE": {"id": known, "text": fact, "event": "NONE"},
            "bad id": {"id": "99", "text": fact, "event": "DELETE"},
            "no text": {"id": known, "text": "", "event": "UPDATE"},
        }[kind]


def first_turns(dialogue: Dialogue, count: int) -> Iterator[Session]:
    """Said today, which the package takes for the day of every conversation."""
    for session in dialogue.sessions:
        turns = tuple(replace(turn, time=None) for turn in session.turns[:count])
        count -= len(turns)
        if turns:
            yield Session(session.id, date.today().isoformat(), turns)


class Package:
    """The package with the scripted model and the encoder put in, and a record of where its memories come from."""

    def __init__(self, folder: Path, encode: Any, seen: dict[str, int]) -> None:
        from mem0 import Memory
        from mem0.configs.base import MemoryConfig

        store = {"path": str(folder / "qdrant"), "embedding_model_dims": 384, "on_disk": False}
        key = {"provider": "openai", "config": {"api_key": "none"}}
        parts = {"vector_store": {"provider": "qdrant", "config": store}, "llm": key, "embedder": key}
        self.memory = Memory(MemoryConfig(**parts, history_db_path=str(folder / "history.db")))
        self.asked: list[list[dict[str, str]]] = []
        self.held: dict[str, tuple[str, str, set[str]]] = {}
        self.memory.embedding_model = self.memory.llm = self  # both are the scripted model
        self.encode, self.seen = encode, seen

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        return self.encode(text).tolist()  # type: ignore[no-any-return]

    def generate_response(self, messages: list[dict[str, str]], **_: Any) -> str:
        self.asked.append(messages)
        return play(messages, self.seen)

    def add(self, turns: tuple[Turn, ...], view: str) -> None:
        roles = ["user" if turn.speaker == view else "assistant" for turn in turns]
        messages = [{"role": role, "content": turn_text(turn)} for role, turn in zip(roles, turns, strict=True)]
        for event in self.memory.add(messages, user_id=view)["results"]:
            *_, sources = self.held.pop(event["id"], ("", "", set()))
            if event["event"] != "DELETE":
                self.held[event["id"]] = (view, event["memory"], sources | {turn.id for turn in turns})


class OfficialBank(Mem0Bank):
    """Ours with the package's prompts."""

    def extract(self, turns: Sequence[Turn], speaker: str, day: str) -> Reply:
        from mem0.configs.prompts import USER_MEMORY_EXTRACTION_PROMPT

        roles = ("user" if turn.speaker == speaker else "assistant" for turn in turns)
        lines = "".join(f"{role}: {turn_text(turn)}\n" for role, turn in zip(roles, turns, strict=True))
        system = Message("system", _TODAY.sub(lambda _: day, USER_MEMORY_EXTRACTION_PROMPT))
        return self.pose("extract", system, Message("user", f"Input:\n{lines}"))

    def decide(self, entries: Sequence[str], facts: Sequence[str]) -> Reply:
        from mem0.configs.prompts import get_update_memory_messages

        listed = [{"id": str(place), "text": text} for place, text in enumerate(entries)]
        return self.pose("update", Message("user", get_update_memory_messages(listed, facts)))

    def pose(self, stage: str, *messages: Message) -> Reply:
        return self.send(Request(messages, stage, self.dialogue_id, stage, ROOM, schema=SCHEMAS[stage]))[0]


@pytest.mark.parametrize("seed", range(3))
def test_memories_provenance_and_prompts_are_those_of_the_package(
    seed: int, remind_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    monkeypatch.setenv("MEM0_DIR", str(tmp_path))
    encoder, seen = SentenceEncoder(), dict[str, int]()
    theirs = Package(tmp_path, cache(lambda text: encoder.encode_apart([text])[0]), seen)
    chat = ScriptedChat(lambda request: play(request.chat, seen))
    sessions = list(first_turns(read(remind_data / "locomo" / "locomo_dev.json").dialogues[seed], TURNS))
    assert sum(len(session.turns) for session in sessions) == TURNS
    for session in sessions:
        for start in range(0, len(session.turns), 2):
            batch = session.turns[start : start + 2]
            for view in dict.fromkeys(turn.speaker for turn in batch):
                theirs.add(batch, view)
    with OfficialBank(tmp_path / "bank", "d", Mem0System(), services(encoder, chat)) as bank:
        for session in sessions:
            bank.ingest(session)
        kept = [(bank.store.note(number), bank.store.memory(number)) for number in bank.store.numbers()]
    held = sorted((view, memory.text, sorted(memory.sources or ())) for view, memory in kept)
    assert [request.chat for request in chat.asked] == theirs.asked
    assert held == sorted((view, text, sorted(sources)) for view, text, sources in theirs.held.values())
    assert len(held) > 20
    assert {"ADD", "UPDATE", "DELETE", "NONE", "bad id", "no text"} <= set(seen)
