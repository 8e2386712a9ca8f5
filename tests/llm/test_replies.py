"""What comes back from a server and how it is read: JSON found, checked and repaired once; bodies that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("openai", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")
pytest.importorskip("jsonschema", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")

from fault_proxy import Proxy, completion

from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Reply, Request

Ask = Callable[..., Request]
Endpoint = Callable[..., EndpointConfig]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def replies_to(answers: list[str], ask: Ask, endpoint: Endpoint, ledger: Ledger | None = None) -> tuple[Reply, Proxy]:
    left = iter(answers)
    with Proxy(answer=lambda body: (200, {}, completion(next(left)))) as proxy:
        chat = OpenAIChat(endpoint(proxy.url, price_prompt=1e6, price_completion=2e6), ledger=ledger)
        return chat.complete([ask("count", schema=SCHEMA)])[0], proxy


@pytest.mark.parametrize(
    "text", ['{"n": 3}', 'Sure!\n```json\n{"n": 3}\n```', '<think>{"n": 4}</think> {"n": 3}', 'x {"m": 1} {"n": 3}']
)
def test_json_is_found_and_checked(text: str, ask: Ask, endpoint: Endpoint) -> None:
    reply, _proxy = replies_to([text], ask, endpoint)
    assert (reply.value, reply.failure, reply.calls) == ({"n": 3}, None, 1)


@pytest.mark.parametrize(
    ("text", "said"), [('{"n": "x"}', "n: 'x' is not of type 'integer'"), ("no", "there is no JSON")]
)
def test_json_is_repaired_once(text: str, said: str, ask: Ask, endpoint: Endpoint) -> None:
    ledger = Ledger()
    reply, proxy = replies_to([text, '{"n": 3}'], ask, endpoint, ledger)
    assert (reply.value, reply.failure, reply.calls, proxy.hits) == ({"n": 3}, None, 2, 2)
    assert (reply.prompt_tokens, reply.completion_tokens) == (20, 6)
    again = proxy.bodies[1]["messages"]
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert again[1]["content"] == text
    assert said in again[2]["content"]
    total = ledger.summary()["total"]
    assert (total["requests"], total["calls"], total["cost_usd"]) == (1, 2, 20 + 12)


def test_json_that_stays_wrong_is_invalid(ask: Ask, endpoint: Endpoint) -> None:
    reply, proxy = replies_to(["no", '{"n": null}'], ask, endpoint)
    assert (reply.failure, reply.value, reply.text, proxy.hits) == ("invalid", None, '{"n": null}', 2)
    assert "n: None is not of type 'integer'" in reply.message


def test_a_reply_cut_off_by_max_tokens_is_no_json(ask: Ask, endpoint: Endpoint) -> None:
    with Proxy(answer=lambda body: (200, {}, completion('{"n": 3} and', reason="length"))) as proxy:
        chat = OpenAIChat(endpoint(proxy.url))
        plain, strict = chat.complete([ask("free"), ask("count", schema=SCHEMA)])
    assert (plain.text, plain.finished, plain.failure) == ('{"n": 3} and', False, None)
    assert strict.failure == "invalid"
    assert "cut off" in strict.message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": {"content": 3}}]}',
        b"\xff",
    ],
)
def test_a_body_that_is_no_completion_is_tried_again(content: bytes, quick: None, ask: Ask, endpoint: Endpoint) -> None:
    answers = iter([(200, {}, content), (200, {}, completion("well"))])
    with Proxy(answer=lambda body: next(answers)) as proxy:
        reply = OpenAIChat(endpoint(proxy.url)).complete([ask("hello")])[0]
    assert (reply.text, reply.calls) == ("well", 2)


def test_odd_but_whole_replies(ask: Ask, endpoint: Endpoint) -> None:
    bodies = {
        "null": b'{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}',
        "parts": b'{"choices": [{"message": {"content": [{"text": "a"}, {"text": "b"}]}}], "usage": null}',
        "surrogate": b'{"choices": [{"message": {"content": "a\\ud800"}}]}',
    }
    with Proxy(answer=lambda body: (200, {}, bodies[body["messages"][0]["content"]])) as proxy:
        replies = OpenAIChat(endpoint(proxy.url)).complete([ask(name) for name in bodies])
    assert [(reply.text, reply.finished) for reply in replies] == [("", False), ("ab", True), ("a?", True)]
