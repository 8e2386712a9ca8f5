"""The client against a real server: `transformers serve` with two tiny Qwen3 models of ours, over HTTP."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_samples import ask, chat

from remind.llm.endpoints import LOCAL, EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.local import LocalChat

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"equal": {"type": "boolean"}}, "required": ["equal"]}


def plain(text: str) -> str:
    """Without special tokens, which the server tells and we do not, and without the space around, which it strips."""
    return re.sub(r"<\|\w+\|>", "", text).strip()


def test_the_server_and_the_model_in_this_process_say_the_same(server: Any) -> None:
    requests = [ask(f"Where did {name} go?", max_tokens=6) for name in ("Ann", "Ben", "Cleo", "the dog")]
    ledger = Ledger()
    there = chat(server.url, ledger=ledger, model=server.random, concurrency=2).complete(requests)
    here = LocalChat(EndpointConfig(server.random, LOCAL, concurrency=4)).complete(requests)
    assert all(reply.failure is None and reply.calls == 1 for reply in (*there, *here))
    assert [plain(reply.text) for reply in there] == [plain(reply.text) for reply in here]
    assert len({reply.text for reply in there}) == len(requests)
    assert [(r.prompt_tokens, r.finished) for r in there] == [(r.prompt_tokens, r.finished) for r in here]
    total = ledger.summary()["total"]
    assert total["prompt_tokens"] == sum(reply.prompt_tokens for reply in here)
    assert total["completion_tokens"] == sum(reply.completion_tokens for reply in there)


def test_json_from_a_model_that_can_and_from_one_that_cannot(server: Any) -> None:
    request = ask("Are they equal? Reply as JSON.", max_tokens=12, schema=SCHEMA)
    able, unable = (chat(server.url, model=name).complete([request])[0] for name in (server.saying, server.random))
    assert (able.value, able.failure, able.calls, able.finished) == ({"equal": True}, None, 1, True)
    assert (unable.value, unable.failure, unable.calls) == (None, "invalid", 2)
    assert unable.text


def test_what_the_server_refuses(server: Any, quick: None) -> None:
    [odd] = chat(server.url, model=server.saying, extra_body={"colour": "red"}).complete([ask("hello")])
    assert (odd.failure, odd.calls) == ("refused", 1)
    assert "colour" in odd.message
    [unknown] = chat(server.url, model="no/such-model", retries=1).complete([ask("hello")])
    assert unknown.failure in ("server", "refused")  # this server answers 500
    assert unknown.message
