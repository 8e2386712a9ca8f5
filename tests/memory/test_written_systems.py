"""What every system that a chat model writes for owes: order, lost requests, and replies that hold half a character."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, dump, parts, services, session
from words import WordEncoder

from remind.core.errors import ModelError
from remind.llm.request import Reply, Request, completion
from remind.llm.structured import placeholder
from remind.memory.bank import Bank
from remind.memory.base import Query
from remind.memory.gam import PLAN_SCHEMA
from remind.memory.systems import SYSTEMS, make_system

PACKAGES = ("mem0_today", "langmem")
#: Systems that ask a chat model.
WRITTEN = [name for name in SYSTEMS if name not in (*PACKAGES, "remind_x1", "lme_facts")]
WRITTEN = [name for name in WRITTEN if name != "remind" and make_system(name).templates]
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
HALF = "Tom \ud83d the cat \\ude00 \\\\ud83d ran."


def opened(name: str, folder: Path, chat: ScriptedChat, max_failed: float = 1.0, **options: Any) -> Bank:
    system = make_system(name, {**SMALL.get(name, {}), **options})
    return system.open(folder, "d", services(WordEncoder(200), chat, max_failed))  # type: ignore[arg-type]


def ingested(bank: Bank) -> None:
    for one in TALK:
        bank.ingest(one)
    bank.finish()


def filled(schema: Any, text: str) -> str:
    """A reply of the schema's shape whose texts are all this one; JSON escapes what it cannot hold."""
    value = json.dumps(placeholder(schema)).replace("false", "true")
    value = re.sub(r'("(?:sources|used|message)": \[?)0', r"\g<1>1", value).replace('"-"', json.dumps(text))
    return value.replace("\\\\\\\\ud83d", "\\\\ud83d").replace("\\\\ude00", "\\ude00")


def halves(request: Request) -> str:
    """Replies of every kind, with half a character wherever there is a text."""
    if request.body is not None:
        names = [tool["function"]["name"] for tool in request.body["tools"]]
        written = {"content": HALF} if "archival_memory_insert" in names else {"query": HALF}
        tool = "archival_memory_insert" if "archival_memory_insert" in names else "conversation_search"
        call = {"id": "1", "function": {"name": tool, "arguments": json.dumps(written)}}
        done = len(request.body["messages"]) > 2
        message = {"content": HALF} if done else {"content": None, "tool_calls": [call]}
        return json.dumps(completion("m", message, "stop", 1, 1))
    if request.schema is not None:
        return filled(request.schema, HALF)
    if "rmm_update" in request.prompt_id:
        return f"Add() {HALF}"
    return f"<think>{HALF}</think><search>{HALF}</search>" if "mem1" in request.prompt_id else HALF


@pytest.mark.parametrize("name", WRITTEN)
def test_a_bank_keeps_what_it_was_given_once(name: str, tmp_path: Path) -> None:
    chat = ScriptedChat(halves)
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


def in_order(text: str) -> bool:
    places = [LINES.index(line) for line in sorted(LINES, key=text.find) if line in text]
    return places == sorted(places)


def searching(request: Request) -> str:
    """Looks for the cat in every way there is, and never has enough."""
    if "mem1" in request.prompt_id:
        return "<think>So far.</think><search>Tom the cat ran away</search>"
    if "gam_plan" in request.prompt_id:
        plan = {"tools": ["page_index", "vector"], "page_index": [3, 0], "vector_queries": ["Tom the cat ran away."]}
        return json.dumps({**placeholder(PLAN_SCHEMA), **plan})
    if "lightmem_extract" in request.prompt_id:
        told = re.findall(r"^(\d+)\. .*?(?:Ann|Bob): (.*)$", parts(request)["remarks"], re.MULTILINE)
        return json.dumps({"data": [{"source_id": int(number), "fact": line} for number, line in told]})
    if request.schema is not None:
        return filled(request.schema, "Tom.").replace("true", "false")
    return "Tom."


@pytest.mark.parametrize("name", ["gam", "mem1", "memagent", "lightmem", "memoryos", "amem", "mem0", "salimory"])
def test_what_is_shown_together_is_in_the_order_of_the_dialogue(name: str, tmp_path: Path) -> None:
    chat = ScriptedChat(searching)
    with opened(name, tmp_path / "b", chat, **({"top": 3} if name in ("gam", "mem1") else {})) as bank:
        ingested(bank)
        bank.retrieve(Query("What became of the cat Tom?"), k=9)
    shown = [
        text for request in chat.asked for part, text in parts(request).items() if part not in ("nearest", "entry")
    ]
    assert any(sum(line in text for line in LINES) > 1 for text in shown) or name in ("amem", "salimory")
    assert [text for text in shown if not in_order(text)] == []


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("memagent", "mem1")])
def test_lost_requests_are_counted_told_and_limited(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third reply cannot be read, at first."""
    down, number = [True], count()

    def faulty(request: Request) -> str | Reply:
        lost = next(number) % 3 == 0 and down[0]
        return Reply("", failure="server", message="no reply") if lost else halves(request)

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
