"""What every system that a chat model writes for owes: it keeps what it was given once, in order, and counts losses."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, dump, services, session
from words import WordEncoder

from remind.core.errors import ModelError
from remind.llm.request import Reply, Request, completion
from remind.llm.structured import placeholder
from remind.memory.bank import Bank
from remind.memory.base import Query
from remind.memory.systems import SYSTEMS, make_system

#: Systems that ask a chat model.
WRITTEN = [name for name in SYSTEMS if not name.startswith("remind") and name not in ("langmem", "lme_facts")]
WRITTEN = [name for name in WRITTEN if make_system(name).templates]
#: So small that everything they do is done.
SMALL: dict[str, dict[str, Any]] = {
    "memoryos": {"short": 1, "hot": 1},
    "lightmem": {"sensory": 8, "short": 8, "update_at": 0.0},
    "membuilder": {"block_characters": 20, "compressed_characters": 10},
}
#: Times as LoCoMo's are, of any precision: as texts they are in another order than the sessions.
TALK = [
    session("s1", "2023-05-08T13:56", "Ann: My cat is called Tom.", "Bob: Tom is a fine name for a cat."),
    session("s2", "2023-05", "Ann: The cat Tom sleeps all day.", "Bob: A cat does."),
    session("s3", "2023-05-10", "Ann: Tom the cat ran away.", "Bob: Poor cat."),
    session("s4", "1 pm on a day in May", "Ann: The cat is back.", "Bob: Good cat Tom."),
]
LINES = [turn.text for one in TALK for turn in one.turns]
SAID = "Tom the cat ran."


def opened(name: str, folder: Path, chat: ScriptedChat, max_failed: float = 1.0, **options: Any) -> Bank:
    system = make_system(name, {**SMALL.get(name, {}), **options})
    return system.open(folder, "d", services(WordEncoder(200), chat, max_failed))  # type: ignore[arg-type]


def ingested(bank: Bank) -> None:
    for one in TALK:
        bank.ingest(one)
    bank.finish()


def filled(schema: Any, text: str) -> str:
    """A reply of the schema's shape whose texts are all this one."""
    value = json.dumps(placeholder(schema)).replace("false", "true")
    return re.sub(r'("(?:sources|used|message)": \[?)0', r"\g<1>1", value).replace('"-"', json.dumps(text))


def replies(request: Request) -> str:
    """Replies of every kind."""
    if request.body is not None:
        names = [tool["function"]["name"] for tool in request.body["tools"]]
        written = {"content": SAID} if "archival_memory_insert" in names else {"query": SAID}
        tool = "archival_memory_insert" if "archival_memory_insert" in names else "conversation_search"
        call = {"id": "1", "function": {"name": tool, "arguments": json.dumps(written)}}
        done = len(request.body["messages"]) > 2
        message = {"content": SAID} if done else {"content": None, "tool_calls": [call]}
        return json.dumps(completion("m", message, "stop", 1, 1))
    if request.schema is not None:
        return filled(request.schema, SAID)
    if "rmm_update" in request.prompt_id:
        return f"Add() {SAID}"
    return f"<think>{SAID}</think><search>{SAID}</search>" if "mem1" in request.prompt_id else SAID


@pytest.mark.parametrize("name", WRITTEN)
def test_a_bank_keeps_what_it_was_given_once(name: str, tmp_path: Path) -> None:
    chat = ScriptedChat(replies)
    query = Query("What became of the cat Tom?", "q")
    with opened(name, tmp_path / "b", chat) as bank:
        ingested(bank)
        content, asked = dump(bank), len(chat.asked)
        ingested(bank)
        assert (dump(bank), len(chat.asked)) == (content, asked)
        first = bank.retrieve(query, k=9).memories
        bank.retrieve(Query("Is the cat back?"), k=9)
        assert bank.retrieve(query, k=9).memories == first
        assert dump(bank) == content, "a question changes nothing"
    with opened(name, tmp_path / "c", chat) as bank:
        bank.ingest(TALK[0])
    with opened(name, tmp_path / "c", chat) as bank:
        ingested(bank)
        assert dump(bank) == content, "also one that was closed between two sessions"


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("memagent", "mem1")])
def test_lost_requests_are_counted_told_and_limited(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third reply cannot be read, at first."""
    down, number = [True], count()

    def faulty(request: Request) -> str | Reply:
        lost = next(number) % 3 == 0 and down[0]
        return Reply("", failure="server", message="no reply") if lost else replies(request)

    chat = ScriptedChat(faulty)
    with opened(name, tmp_path / "b", chat, max_failed=0.9) as bank:
        ingested(bank)
        report = bank.report()
        assert 0 < report["lost"] <= report["asked"] == len(chat.asked)
        told = f"{name}: {report['lost']} of {report['asked']} requests for dialogue d were lost; the last: "
        assert told in caplog.text
    with opened(name, tmp_path / "c", chat, max_failed=0.1) as bank:
        with pytest.raises(ModelError, match=rf"^{name}: \d+ of \d+ requests .*, more than max_failed 0.1; the last:"):
            ingested(bank)
        down[0] = False
        assert bank.repair()
        bank.finish()
        assert bank.report()["lost"] == 0
