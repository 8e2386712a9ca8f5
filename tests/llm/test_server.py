"""The client against a real server: `transformers serve` with two tiny Qwen3 models of ours, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")
pytest.importorskip("jsonschema", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")

from fault_proxy import Proxy, Server

from remind.llm.cache import ReplyCache
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import LOCAL, EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.local import LocalChat
from remind.llm.request import Request

pytestmark = pytest.mark.slow

Ask = Callable[..., Request]
Endpoint = Callable[..., EndpointConfig]
SCHEMA = {"type": "object", "properties": {"equal": {"type": "boolean"}}, "required": ["equal"]}


def plain(text: str) -> str:
    """Without special tokens, which the server tells and we do not, and without the space around, which it strips."""
    return re.sub(r"<\|\w+\|>", "", text).strip()


def test_the_server_and_the_model_in_this_process_say_the_same(server: Server, ask: Ask, endpoint: Endpoint) -> None:
    requests = [ask(f"Where did {name} go?", max_tokens=6) for name in ("Ann", "Ben", "Cleo", "the dog")]
    ledger = Ledger()
    place = endpoint(server.url, model=server.random, concurrency=2)
    there = OpenAIChat(place, ledger=ledger).complete(requests)
    here = LocalChat(EndpointConfig(server.random, LOCAL, concurrency=4)).complete(requests)
    assert all(reply.failure is None and reply.calls == 1 for reply in (*there, *here))
    assert [plain(reply.text) for reply in there] == [plain(reply.text) for reply in here]
    assert len({reply.text for reply in there}) == len(requests)
    assert [reply.prompt_tokens for reply in there] == [reply.prompt_tokens for reply in here]
    assert [reply.finished for reply in there] == [reply.finished for reply in here]
    total = ledger.summary()["total"]
    assert total["prompt_tokens"] == sum(reply.prompt_tokens for reply in here)
    assert total["completion_tokens"] == sum(reply.completion_tokens for reply in there)


def test_spoiled_calls_change_no_reply_and_cost_no_second_one(
    server: Server, ask: Ask, endpoint: Endpoint, quick: None, tmp_path: Path
) -> None:
    requests = [ask(f"What does {name} like?", max_tokens=4) for name in "abcdefghijkl"]
    plain_replies = OpenAIChat(endpoint(server.url, model=server.random)).complete(requests)
    with Proxy(server.url, share=0.3, seed=0, slow=25.0) as proxy:
        place = endpoint(proxy.url, model=server.random, name="tiny", timeout=20, retries=10, concurrency=4)
        cache = ReplyCache(tmp_path / "c.sqlite")
        replies = OpenAIChat(place, cache).complete(requests)
        hits = proxy.hits
        again = OpenAIChat(place, ReplyCache(cache.path)).complete(requests)
    assert [reply.text for reply in replies] == [reply.text for reply in plain_replies]
    assert proxy.faults.total() > 0
    assert hits == proxy.hits == sum(reply.calls for reply in replies)
    assert all(reply.cached and reply.calls == 0 for reply in again)
    assert [reply.text for reply in again] == [reply.text for reply in replies]


def test_json_from_a_model_that_can_and_from_one_that_cannot(server: Server, ask: Ask, endpoint: Endpoint) -> None:
    request = ask("Are they equal? Reply as JSON.", max_tokens=12, schema=SCHEMA)
    able, unable = (OpenAIChat(endpoint(server.url, model=name)) for name in (server.saying, server.random))
    reply = able.complete([request])[0]
    assert (reply.value, reply.failure, reply.calls, reply.finished) == ({"equal": True}, None, 1, True)
    reply = unable.complete([request])[0]
    assert (reply.value, reply.failure, reply.calls) == (None, "invalid", 2)
    assert reply.text


def test_what_the_server_refuses(server: Server, ask: Ask, endpoint: Endpoint, quick: None) -> None:
    odd = OpenAIChat(endpoint(server.url, model=server.saying, extra_body={"colour": "red"})).complete([ask("hello")])[
        0
    ]
    assert (odd.failure, odd.calls) == ("refused", 1)
    assert "colour" in odd.message
    unknown = OpenAIChat(endpoint(server.url, model="no/such-model", retries=1)).complete([ask("hello")])[0]
    assert unknown.failure in ("server", "refused")  # this server answers 500
    assert unknown.message
