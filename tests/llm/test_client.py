"""The client against a server that spoils calls: what is tried again, what is not, and how replies are read."""

from __future__ import annotations

import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_samples import ask, chat
from fault_proxy import Proxy, completion, error

from remind.core.errors import ConfigError, ModelError
from remind.llm.cache import ReplyCache
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import Message, Reply, Request

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def reply_to(answer: Any, **fields: Any) -> tuple[Reply, Proxy]:
    """What becomes of one request to a server that answers so."""
    with Proxy(answer=answer) as proxy:
        [reply] = chat(proxy.url, **fields).complete([ask("hello")])
    return reply, proxy


def test_a_third_of_the_tries_is_spoiled_and_no_reply_lost_or_paid_for_twice(quick: None, tmp_path: Path) -> None:
    requests = [ask(f"word {number}") for number in range(60)]
    seen: list[int] = []
    with Proxy(share=0.3, seed=1, slow=3.0) as proxy:
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), timeout=2, retries=12)
        replies = model.complete(requests, lambda index, reply: seen.append(index))
        hits = proxy.hits
        again = model.complete(requests)
    assert [reply.text for reply in replies] == [f"you said: word {number}" for number in range(60)]
    assert sorted(seen) == list(range(60))
    assert set(proxy.faults) == {"rate", "broken", "slow", "cut", "malformed"}
    assert sum(reply.calls for reply in replies) == hits == proxy.hits == 60 + proxy.faults.total()
    assert set(proxy.paid.values()) == {1}
    assert [(reply.text, reply.cached, reply.calls) for reply in again] == [(one.text, True, 0) for one in replies]


def test_retry_after_is_waited_for_but_not_an_hour(quick: None) -> None:
    answers = iter([error(429, "slow down", **{"Retry-After": "0.7"}), (200, {}, completion("well"))])
    reply, proxy = reply_to(lambda body: next(answers))
    assert (reply.text, reply.calls) == ("well", 2)
    assert proxy.times[1] - proxy.times[0] >= 0.7
    assert reply.seconds >= 0.7
    started = time.monotonic()
    reply, proxy = reply_to(lambda body: error(429, "later", **{"Retry-After": "3600"}))
    assert (reply.failure, proxy.hits) == ("server", 1)
    assert "Retry-After: 3600 s" in reply.message
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (400, "temperature is out of range", "refused"),
        (401, "Incorrect API key provided: sk-abcd****wxyz", "refused"),
        (404, "The model `m` does not exist", "refused"),
        (418, ["odd"], "refused"),
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
def test_what_no_further_try_can_mend_is_not_tried_again(status: int, body: Any, failure: str) -> None:
    answer = error(status, body) if isinstance(body, str) else (status, {}, json.dumps(body).encode())
    reply, proxy = reply_to(lambda body: answer)
    assert (reply.failure, reply.calls, proxy.hits) == (failure, 1, 1)
    assert str(status) in reply.message
    assert "sk-abcd" not in reply.message


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int, quick: None) -> None:
    reply, proxy = reply_to(lambda body: (status, {}, b"<html>busy</html>"), retries=2)
    assert (reply.failure, reply.calls, proxy.hits) == ("server", 3, 3)
    assert reply.message == f"HTTP {status} (after 3 tries)"


@pytest.mark.parametrize("retries", [0, 6])
def test_no_server_ends_the_whole_call(retries: int, quick: None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(ModelError, match=r"127\.0\.0\.1.*is the server running\?"):
        chat(url, retries=retries).complete([ask(str(n)) for n in range(20)])


def test_a_server_that_goes_away_later_fails_single_requests(quick: None) -> None:
    with Proxy(answer=lambda body: (200, {"Connection": "close"}, completion("well"))) as proxy:
        model = chat(proxy.url, retries=1)
        assert model.complete([ask("one")])[0].failure is None
    reply = model.complete([ask("two")])[0]
    assert (reply.failure, reply.calls) == ("server", 2)


def test_concurrency_holds_over_threads() -> None:
    with Proxy(delay=0.1) as proxy:
        model = chat(proxy.url, concurrency=3)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda k: model.complete([ask(f"{k} {n}") for n in range(6)]), range(3)))
    assert proxy.hits == 18
    assert proxy.most_busy == 3


def test_same_words_are_asked_once_and_what_cannot_be_sent_is_refused() -> None:
    with Proxy() as proxy:
        requests = [ask("a", sample="1"), ask("lone \ud800"), ask("b"), ask("a", sample="2")]
        first, odd, *rest = chat(proxy.url).complete(requests)
    assert [(one.text, one.cached) for one in (first, *rest)] == [
        ("you said: a", False),
        ("you said: b", False),
        ("you said: a", True),
    ]
    assert proxy.hits == 2
    assert (odd.failure, odd.calls) == ("refused", 0)
    assert "cannot be sent" in odd.message


def test_what_is_sent() -> None:
    request = Request(
        (Message("system", "be brief"), Message("user", "hé \U0001f600")), "cues", max_tokens=7, schema=SCHEMA
    )
    fields = {"structured": True, "extra_body": {"seed": 3, "temperature": None, "max_completion_tokens": 9}}
    with Proxy(answer=lambda body: (200, {}, completion('{"n": 1}'))) as proxy:
        chat(proxy.url, model="the/model", **fields).complete([request])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé \U0001f600"}]
    format_ = {"type": "json_schema", "json_schema": {"name": "cues", "schema": SCHEMA}}
    rest = {"max_tokens": 7, "seed": 3, "max_completion_tokens": 9, "response_format": format_}
    assert proxy.bodies == [{"model": "the/model", "messages": messages, **rest}]


def test_a_callback_that_fails_ends_the_call() -> None:
    def fail(index: int, reply: Reply) -> None:
        raise KeyboardInterrupt

    with Proxy(delay=0.05) as proxy, pytest.raises(KeyboardInterrupt):
        chat(proxy.url, concurrency=2).complete([ask(str(n)) for n in range(100)], fail)
    assert proxy.hits < 20


#: Variables that the package openai reads besides the key.
AMBIENT = {
    "OPENAI_ORG_ID": "org-PRIVATE",
    "OPENAI_PROJECT_ID": "proj-PRIVATE",
    "OPENAI_ADMIN_KEY": "admin-PRIVATE",
    "OPENAI_WEBHOOK_SECRET": "hook-PRIVATE",
    "OPENAI_CUSTOM_HEADERS": "X-Own: PRIVATE\nAuthorization: Bearer PRIVATE\nUser-Agent: PRIVATE\nHost: PRIVATE",
}


def test_the_server_gets_the_key_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No other header of the environment goes out, and the key is in no reply, message, log or cache."""
    key = "secret-0123456789"
    for name, value in {**AMBIENT, "MY_KEY": key}.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)

    def echo(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if body["messages"][0]["content"] == "bad":
            return error(400, f"you sent Bearer {key}")
        return 200, {}, completion(f"your key is {key}")

    with Proxy(answer=echo) as proxy:
        ledger = Ledger()
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), ledger, key_env="MY_KEY", concurrency=1)
        replies = model.complete([ask("good"), ask("bad")])
        chat(proxy.url, key_env=None).complete([ask("good")])
    assert [head["authorization"] for head in proxy.heads] == [f"Bearer {key}"] * 2 + ["Bearer none"]
    assert replies[0].text == "your key is [key]"
    told = [repr(replies), repr(model), model.name, repr(vars(model.endpoint)), str(ledger.summary()), caplog.text]
    assert all(key not in text for text in told)
    assert all(key.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    common = "host accept accept-encoding connection content-length content-type user-agent authorization"
    for head in proxy.heads:
        assert set(head) <= set(common.split())
        assert head["host"] in proxy.url
        assert "PRIVATE" not in str(head)


def test_keys_that_are_missing_or_not_meant_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match="OPENAI_API_KEY"):
        OpenAIChat(EndpointConfig("m"))
    for endpoint, reason in ((EndpointConfig(), "no model is named"), (EndpointConfig("m", "local"), "base_url")):
        with pytest.raises(ConfigError, match=reason):
            OpenAIChat(endpoint)
    with pytest.raises(ModelError, match="NO_SUCH_KEY"):
        chat("http://127.0.0.1:1/v1", key_env="NO_SUCH_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-openai-only")
    with Proxy() as proxy:
        chat(proxy.url).complete([ask("hello")])
    assert "sk-for" not in str(proxy.heads)


def test_a_redirect_is_not_followed(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt would go to a host that nobody named."""
    monkeypatch.setenv("MY_KEY", "mine-0123456789")
    with Proxy() as other:
        for status in (301, 302, 303, 307, 308):
            target = {"Location": f"{other.url}/chat/completions?sig=PRIVATE"}
            with Proxy(answer=lambda body, status=status, target=target: (status, target, b"")) as named:  # type: ignore[misc]
                [reply] = chat(named.url, key_env="MY_KEY").complete([ask("hello")])
            assert (reply.failure, reply.calls, named.hits) == ("refused", 1, 1)
            assert reply.message.startswith(f"HTTP {status}: the server sends requests elsewhere")
            assert "\n" not in reply.message
            assert "PRIVATE" not in reply.message
    assert other.hits == 0


@pytest.mark.parametrize(
    ("text", "reason"), [('{"n": "x"}', "n: 'x' is not of type 'integer'"), ("no", "there is no JSON")]
)
def test_json_is_repaired_once(text: str, reason: str) -> None:
    ledger, answers = Ledger(), iter([text, '{"n": 3}', "no", '{"n": null}'])
    request = ask("count", schema=SCHEMA)
    with Proxy(answer=lambda body: (200, {}, completion(next(answers)))) as proxy:
        model = chat(proxy.url, ledger=ledger, price_prompt=1e6, price_completion=2e6)
        [reply] = model.complete([request])
        total = ledger.summary()["total"]
        [wrong] = model.complete([request])
    assert (reply.value, reply.failure, reply.calls, proxy.hits) == ({"n": 3}, None, 2, 4)
    assert (reply.prompt_tokens, reply.completion_tokens) == (20, 6)
    again = proxy.bodies[1]["messages"]
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert again[1]["content"] == text
    assert reason in again[2]["content"]
    assert (total["requests"], total["calls"], total["cost_usd"]) == (1, 2, 20 + 12)
    assert (wrong.failure, wrong.value, wrong.text, wrong.calls) == ("invalid", None, '{"n": null}', 2)
    assert "n: None is not of type 'integer'" in wrong.message


def test_a_reply_cut_off_by_max_tokens_is_no_json() -> None:
    """And there may be no room to ask again."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        full = body["messages"][0]["content"] == "full" and len(body["messages"]) > 1
        return error(400, "context length") if full else (200, {}, completion('{"n": 3} and', reason="length"))

    with Proxy(answer=answer) as proxy:
        requests = [ask("free"), ask("count", schema=SCHEMA), ask("full", schema=SCHEMA)]
        plain, strict, full = chat(proxy.url).complete(requests)
    assert (plain.text, plain.finished, plain.failure) == ('{"n": 3} and', False, None)
    assert (strict.failure, full.failure, full.text) == ("invalid", "invalid", plain.text)
    assert "cut off" in strict.message
    assert full.message.endswith("no room to ask again")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"choices": [{}]}', b'{"choices": [{"message": {"content": 3}}]}', b"\xff"]
)
def test_a_body_that_is_no_completion_is_tried_again(content: bytes, quick: None) -> None:
    answers = iter([(200, {}, content), (200, {}, completion("well"))])
    reply, _ = reply_to(lambda body: next(answers))
    assert (reply.text, reply.calls) == ("well", 2)


def test_replies_whose_usage_is_no_count_are_paid_for_once(tmp_path: Path) -> None:
    wrong = ["1e999", "1e300", "1" + "0" * 30, "9" * 5000, "-1000000", "NaN", "0.5", "true", '"7"']
    usages = ["null", "5", '"many"', "{}", '{"prompt_tokens": 7}']
    usages += [f'{{"prompt_tokens": 7, "completion_tokens": {value}}}' for value in wrong]
    usages += [f'{{"prompt_tokens": {value}, "completion_tokens": 7}}' for value in wrong]

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        usage = usages[int(body["messages"][0]["content"])]
        return 200, {}, completion("well").replace(b'{"prompt_tokens": 10, "completion_tokens": 3}', usage.encode())

    with Proxy(answer=answer) as proxy:
        for start in range(2):
            ledger = Ledger()
            model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), ledger, price_prompt=1e6, price_completion=1e6)
            replies = model.complete([ask(str(number)) for number in range(len(usages))])
            assert {(one.text, one.cached, one.usage_known) for one in replies} == {("well", bool(start), False)}
            total = ledger.summary()["total"]
            assert (total["calls"], total["unknown_usage"]) == (len(usages), len(usages))
            assert (total["prompt_tokens"], total["completion_tokens"], total["cost_usd"]) == (0, 0, 0)
            assert f"{len(usages)} replies came without a usable count" in table(ledger.summary())
        assert proxy.hits == len(usages)


def test_odd_but_whole_replies() -> None:
    bodies = {
        "null": b'{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}',
        "parts": b'{"choices": [{"message": {"content": [{"text": "a"}, {"text": "b"}]}}], "usage": null}',
        "surrogate": b'{"choices": [{"message": {"content": "a\\ud800"}}]}',
    }
    with Proxy(answer=lambda body: (200, {}, bodies[body["messages"][0]["content"]])) as proxy:
        replies = chat(proxy.url).complete([ask(name) for name in bodies])
    assert [(reply.text, reply.finished) for reply in replies] == [("", False), ("ab", True), ("a?", True)]
