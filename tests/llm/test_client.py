"""The client against a server that spoils calls: what is tried again, what is not, and how replies are read."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")
pytest.importorskip("jsonschema", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")

from fault_proxy import Proxy, completion, error

from remind.core.errors import ConfigError, ModelError
from remind.llm.cache import ReplyCache
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request

Ask = Callable[..., Request]
Endpoint = Callable[..., EndpointConfig]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_every_request_completes_although_a_third_of_the_tries_is_spoiled(
    quick: None, endpoint: Endpoint, ask: Ask
) -> None:
    with Proxy(share=0.3, seed=1, slow=3.0) as proxy:
        chat = OpenAIChat(endpoint(proxy.url, timeout=2, retries=12))
        seen: list[int] = []
        requests = [ask(f"word {number}") for number in range(60)]
        replies = chat.complete(requests, lambda index, reply: seen.append(index))
    assert [reply.text for reply in replies] == [f"you said: word {number}" for number in range(60)]
    assert sorted(seen) == list(range(60))
    assert set(proxy.faults) == {"rate", "broken", "slow", "cut", "malformed"}
    assert sum(reply.calls for reply in replies) == proxy.hits == 60 + proxy.faults.total()
    assert set(proxy.paid.values()) == {1}


def test_with_few_tries_the_rest_is_reported_failed(quick: None, endpoint: Endpoint, ask: Ask) -> None:
    with Proxy(share=0.6, seed=2, slow=1.5) as proxy:
        replies = OpenAIChat(endpoint(proxy.url, timeout=1, retries=1)).complete([ask(str(n)) for n in range(40)])
    failed = [reply for reply in replies if reply.failure]
    assert 0 < len(failed) < 40
    assert all(reply.failure == "server" and reply.text == "" and reply.calls == 2 for reply in failed)
    assert all("after 2 tries" in reply.message and "\n" not in reply.message for reply in failed)
    assert len(replies) - len(failed) == proxy.paid.total()


def test_retry_after_is_waited_for(quick: None, endpoint: Endpoint, ask: Ask) -> None:
    answers = iter([error(429, "slow down", **{"Retry-After": "0.7"}), (200, {}, completion("well"))])
    with Proxy(answer=lambda body: next(answers)) as proxy:
        reply = OpenAIChat(endpoint(proxy.url)).complete([ask("hello")])[0]
        assert (reply.text, reply.calls) == ("well", 2)
        assert proxy.times[1] - proxy.times[0] >= 0.7
        assert reply.seconds >= 0.7


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (400, "temperature is out of range", "refused"),
        (401, "Incorrect API key provided: sk-abcd****wxyz", "refused"),
        (403, "not for you", "refused"),
        (404, "The model `m` does not exist", "refused"),
        (418, ["odd"], "refused"),
        (422, "Unexpected fields in the request: {'foo'}", "refused"),
        (400, "max_tokens is too large: this model supports at most 16384 completion tokens", "refused"),
        (400, "This model's maximum context length is 4096 tokens. However, you requested 5000", "too_long"),
        (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)", "too_long"),
        (400, "the request exceeds the available context size, try increasing it", "too_long"),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000", "too_long"),
        (400, "The input token count (5000) exceeds the maximum number of tokens allowed (4096)", "too_long"),
        (400, "prompt is too long: 5000 tokens > 4096 maximum", "too_long"),
        (413, "payload too large", "too_long"),
        # by their codes, whatever the words; a spent quota is no rate limit
        (400, {"message": "too much", "code": "context_length_exceeded"}, "too_long"),
        (500, {"error": {"message": "", "type": "exceed_context_size_error"}}, "too_long"),
        (429, {"error": {"message": "pay first", "code": "insufficient_quota"}}, "refused"),
    ],
)
def test_what_no_further_try_can_mend_is_not_tried_again(
    status: int, body: Any, failure: str, endpoint: Endpoint, ask: Ask
) -> None:
    answer = error(status, body) if isinstance(body, str) else (status, {}, json.dumps(body).encode())
    with Proxy(answer=lambda _: answer) as proxy:
        reply = OpenAIChat(endpoint(proxy.url)).complete([ask("hello")])[0]
    assert (reply.failure, reply.calls, proxy.hits) == (failure, 1, 1)
    assert str(status) in reply.message
    assert "sk-abcd" not in reply.message


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int, quick: None, endpoint: Endpoint, ask: Ask) -> None:
    with Proxy(answer=lambda _: (status, {}, b"<html>busy</html>")) as proxy:
        reply = OpenAIChat(endpoint(proxy.url, retries=2)).complete([ask("hello")])[0]
    assert (reply.failure, reply.calls, proxy.hits) == ("server", 3, 3)
    assert reply.message == f"HTTP {status} (after 3 tries)"


def test_a_server_that_asks_for_an_hour_is_not_waited_for(endpoint: Endpoint, ask: Ask) -> None:
    with Proxy(answer=lambda body: error(429, "later", **{"Retry-After": "3600"})) as proxy:
        started = time.monotonic()
        reply = OpenAIChat(endpoint(proxy.url)).complete([ask("hello")])[0]
    assert (reply.failure, proxy.hits) == ("server", 1)
    assert "Retry-After: 3600 s" in reply.message
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("retries", [0, 6])
def test_no_server_ends_the_whole_call(retries: int, quick: None, endpoint: Endpoint, ask: Ask) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(ModelError, match=r"127\.0\.0\.1.*is the server running\?"):
        OpenAIChat(endpoint(url, retries=retries)).complete([ask(str(n)) for n in range(20)])


def test_text_that_cannot_be_sent_is_refused(endpoint: Endpoint, ask: Ask) -> None:
    with Proxy() as proxy:
        odd, fine = OpenAIChat(endpoint(proxy.url)).complete([ask("lone \ud800"), ask("hello")])
    assert (odd.failure, odd.calls) == ("refused", 0)
    assert "cannot be sent" in odd.message
    assert fine.text == "you said: hello"


def test_a_server_that_goes_away_later_fails_single_requests(quick: None, endpoint: Endpoint, ask: Ask) -> None:
    with Proxy(answer=lambda body: (200, {"Connection": "close"}, completion("well"))) as proxy:
        chat = OpenAIChat(endpoint(proxy.url, retries=1))
        assert chat.complete([ask("one")])[0].failure is None
    reply = chat.complete([ask("two")])[0]
    assert (reply.failure, reply.calls) == ("server", 2)


def test_a_dripping_reply_is_given_up(quick: None, endpoint: Endpoint, ask: Ask) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        while True:
            try:
                peer, _ = listener.accept()
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(200):
                    peer.sendall(b" ")
                    time.sleep(0.05)
            except OSError:
                return

    threading.Thread(target=drip, daemon=True).start()
    started = time.monotonic()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    reply = OpenAIChat(endpoint(url, timeout=0.5, retries=0)).complete([ask("hello")])[0]
    listener.close()
    assert reply.failure == "server"
    assert "no whole reply within 0.5 s" in reply.message
    assert time.monotonic() - started < 8


def test_concurrency_holds_over_threads(endpoint: Endpoint, ask: Ask) -> None:
    with Proxy(delay=0.1) as proxy:
        chat = OpenAIChat(endpoint(proxy.url, concurrency=3))
        threads = [
            threading.Thread(target=lambda k=k: chat.complete([ask(f"{k} {n}") for n in range(6)])) for k in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert proxy.hits == 18
    assert proxy.most_busy == 3


def test_same_words_are_asked_once(endpoint: Endpoint, ask: Ask) -> None:
    with Proxy() as proxy:
        replies = OpenAIChat(endpoint(proxy.url)).complete([ask("a", sample="1"), ask("b"), ask("a", sample="2")])
    assert [reply.text for reply in replies] == ["you said: a", "you said: b", "you said: a"]
    assert [reply.cached for reply in replies] == [False, False, True]
    assert proxy.hits == 2


def test_what_is_sent(endpoint: Endpoint) -> None:
    request = Request(
        (Message("system", "be brief"), Message("user", "hé \U0001f600")), "cues", max_tokens=7, schema=SCHEMA
    )
    fields = {"structured": True, "extra_body": {"seed": 3, "temperature": None, "max_completion_tokens": 9}}
    with Proxy(answer=lambda body: (200, {}, completion('{"n": 1}'))) as proxy:
        OpenAIChat(endpoint(proxy.url, model="the/model", **fields)).complete([request])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé \U0001f600"}]
    format_ = {"type": "json_schema", "json_schema": {"name": "cues", "schema": SCHEMA}}
    rest = {"max_tokens": 7, "seed": 3, "max_completion_tokens": 9, "response_format": format_}
    assert proxy.bodies == [{"model": "the/model", "messages": messages, **rest}]


def test_a_callback_that_fails_ends_the_call(ask: Ask, endpoint: Endpoint) -> None:
    def fail(index: int, reply: Reply) -> None:
        raise KeyboardInterrupt

    with Proxy(delay=0.05) as proxy, pytest.raises(KeyboardInterrupt):
        OpenAIChat(endpoint(proxy.url, concurrency=2)).complete([ask(str(n)) for n in range(100)], fail)
    assert proxy.hits < 20


def test_the_key_is_sent_and_appears_nowhere_else(
    ask: Ask, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "secret-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    caplog.set_level(logging.DEBUG)

    def echo(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if body["messages"][0]["content"] == "bad":
            return error(400, f"you sent Bearer {key}")
        return 200, {}, completion(f"your key is {key}")

    with Proxy(answer=echo) as proxy:
        cache, ledger = ReplyCache(tmp_path / "c.sqlite"), Ledger()
        chat = OpenAIChat(endpoint(proxy.url, key_env="MY_KEY"), cache, ledger)
        replies = chat.complete([ask("good"), ask("bad")])
    assert proxy.heads[0]["authorization"] == f"Bearer {key}"
    assert replies[0].text == "your key is [key]"
    told = [repr(replies), repr(chat), chat.name, repr(vars(chat.endpoint)), str(ledger.summary()), caplog.text]
    assert all(key not in text for text in told)
    assert all(key.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_keys_that_are_missing_or_not_meant_for_the_server(
    ask: Ask, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match="OPENAI_API_KEY"):
        OpenAIChat(EndpointConfig("m"))
    with pytest.raises(ModelError, match="NO_SUCH_KEY"):
        OpenAIChat(endpoint("http://127.0.0.1:1/v1", key_env="NO_SUCH_KEY"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-openai-only")
    with Proxy() as proxy:
        OpenAIChat(endpoint(proxy.url)).complete([ask("hello")])
    assert "sk-for" not in str(proxy.heads)


#: Variables that the package openai reads besides the key.
AMBIENT = {
    "OPENAI_ORG_ID": "org-PRIVATE",
    "OPENAI_PROJECT_ID": "proj-PRIVATE",
    "OPENAI_ADMIN_KEY": "admin-PRIVATE",
    "OPENAI_WEBHOOK_SECRET": "hook-PRIVATE",
    "OPENAI_CUSTOM_HEADERS": "X-Own: PRIVATE\nAuthorization: Bearer PRIVATE\nUser-Agent: PRIVATE\nHost: PRIVATE",
}


def test_a_server_gets_the_key_and_no_header_of_the_environment(
    ask: Ask, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**AMBIENT, "MY_KEY": "mine-0123456789"}.items():
        monkeypatch.setenv(name, value)
    with Proxy() as proxy:
        for key_env in ("MY_KEY", None):
            [reply] = OpenAIChat(endpoint(proxy.url, key_env=key_env)).complete([ask("hello")])
            assert reply.text == "you said: hello"
    common = {"host", "accept", "accept-encoding", "connection", "content-length", "content-type", "user-agent"}
    common.add("authorization")
    assert [head["authorization"] for head in proxy.heads] == ["Bearer mine-0123456789", "Bearer none"]
    for head in proxy.heads:
        assert set(head) <= common
        assert head["host"] in proxy.url
        assert "PRIVATE" not in str(head)


def test_a_redirect_is_not_followed(quick: None, ask: Ask, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt would go to a host that nobody named."""
    monkeypatch.setenv("MY_KEY", "mine-0123456789")
    with Proxy() as other:
        for status in (301, 302, 303, 307, 308):
            target = {"Location": f"{other.url}/chat/completions?sig=PRIVATE"}
            with Proxy(answer=lambda body, status=status, target=target: (status, target, b"")) as named:  # type: ignore[misc]
                [reply] = OpenAIChat(endpoint(named.url, key_env="MY_KEY")).complete([ask("hello")])
            assert (reply.failure, reply.calls, named.hits) == ("refused", 1, 1)
            assert reply.message.startswith(f"HTTP {status}: the server sends requests elsewhere")
            assert "\n" not in reply.message
            assert "PRIVATE" not in reply.message
    assert other.hits == 0


def test_mistakes_in_an_endpoint() -> None:
    for fields, word in (
        ({"base_url": "http://user:pass@host/v1"}, "no user"),
        ({"base_url": "https://host/v1?api-key=1"}, "query"),
        ({"base_url": "host:80"}, "base_url"),
        ({"base_url": "http://host:99999/v1"}, "base_url"),
        ({"extra_body": {"Api-Key": "x"}}, "extra_body must hold no Api-Key"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0}, "timeout"),
        ({"concurrency": 0}, "concurrency"),
        ({}, "model"),
    ):
        with pytest.raises(ConfigError, match=word):
            OpenAIChat(EndpointConfig(**fields))  # type: ignore[arg-type]


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
