"""A chat model that a function plays, for tests of systems that write their memories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from remind.data.dialogue import Session, Turn
from remind.llm.request import Reply, Request
from remind.llm.structured import NotValid, read_value
from remind.memory.bank import Bank
from remind.memory.base import Services
from remind.models.encoder import SentenceEncoder

Part = Callable[[Request], str | Reply]
FENCED = re.compile(r"<<<(\w+) ([0-9a-f]{8})\n(.*?)\n\1 \2>>>", re.DOTALL)


class ScriptedChat:
    """Answers each request with what the part says; keeps the requests.

    Args:
        part: the model's words for a request, or a reply as it is.
    """

    name = "scripted"

    def __init__(self, part: Part) -> None:
        self.part = part
        self.asked: list[Request] = []

    def complete(self, requests: Sequence[Request], on_reply: Any = None) -> list[Reply]:
        self.asked += requests
        replies = [self._reply(request) for request in requests]
        for place, reply in enumerate(replies if on_reply else ()):
            on_reply(place, reply)
        return replies

    def stages(self) -> list[str]:
        return [str(request.stage) for request in self.asked]

    def _reply(self, request: Request) -> Reply:
        said = self.part(request)
        if isinstance(said, Reply):
            return said
        reply = Reply(said)
        try:
            return reply if request.schema is None else replace(reply, value=read_value(reply.text, request.schema))
        except NotValid as error:
            return replace(reply, failure="invalid", message=str(error))


@cache
def minilm() -> SentenceEncoder:
    """One for all tests of a process."""
    return SentenceEncoder()


def services(encoder: SentenceEncoder, chat: ScriptedChat | None, max_failed: float = 1.0) -> Services:
    source = None if chat is None else lambda system, dialogue, stage: chat
    return Services(encoder, source, max_failed=max_failed)  # type: ignore[arg-type]


def opened(system: Any, folder: Path, chat: ScriptedChat | None, *sessions: Session, encoder: Any = None) -> Any:
    """A bank of the system that holds the sessions."""
    bank = system.open(folder, "d", services(encoder or minilm(), chat))
    for one in sessions:
        bank.ingest(one)
    return bank


def parts(request: Request) -> dict[str, str]:
    """The fenced data of a request by name."""
    return {name: text for name, _, text in FENCED.findall(request.messages[-1].text)}


def session(name: str, time: str | None, *lines: str) -> Session:
    """A session of lines "Speaker: text", with turn ids like s1:2."""
    turns = [line.split(": ", 1) for line in lines]
    return Session(name, time, tuple(Turn(f"{name}:{n}", who, text, time) for n, (who, text) in enumerate(turns, 1)))


def held(bank: Bank) -> dict[str, tuple[str, ...] | None]:
    """Texts of a bank's memories with their sources."""
    return {memory.text: memory.sources for memory in map(bank.store.memory, bank.store.numbers())}


def as_folded(bank: Any) -> None:
    """The memories of a bank whose journal is a log of operations are those of the log's fold."""
    state = bank.state()
    wanted = state.kept("episodic", "semantic", "procedural") if bank.keeps_versions else []
    wanted += state.current("core", "fact", "preference", "working")
    there = {one.id: one for one in map(bank.store.memory, bank.store.numbers())}
    assert {name: (one.kind, one.text) for name, one in there.items()} == {
        one.id: (one.store, one.text) for one in wanted
    }
    assert all({*(there[one.id].sources or ())} == {*one.sources} for one in wanted if one.store != "core")


def dump(bank: Any) -> list[str]:
    """All that a bank holds, a line per row, the same for banks with the same content however they came about."""
    return [
        f"{table} {json.dumps(row, default=bytes.hex)}"
        for table in ("sessions", "turns", "memories", "sources", "keys", "journal")
        for row in bank.store.rows(f"SELECT * FROM {table} ORDER BY 1, 2")
    ]
