"""The client against servers on bad days: what is asked again, what is not, and what becomes of it in the end."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_samples import ask, chat
from fault_proxy import Proxy, completion

from remind.core.errors import ModelError
from remind.llm.cache import ReplyCache
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import object_schema

pytestmark = pytest.mark.usefixtures("quick")
SCHEMA = object_schema(n={"type": "integer"})


def test_a_third_of_the_tries_is_spoiled_and_no_reply_lost_or_paid_for_twice(tmp_path: Path) -> None:
    requests = [ask(f"word {number}") for number in range(60)]
    with Proxy(share=0.3, seed=1) as proxy:
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), timeout=2, retries=12)
        replies = model.complete(requests)
    assert [reply.text for reply in replies] == [f"you said: word {number}" for number in range(60)]
    assert set(proxy.faults) == {"rate", "broken", "slow", "cut", "malformed"}
    assert proxy.hits == 60 + proxy.faults.total()
    assert set(proxy.paid.values()) == {1}


def test_a_reply_that_never_ends_is_given_up() -> None:
    """Each piece comes within the limit on a read."""

    def drip(_: Any) -> Any:
        return 200, {}, (time.sleep(0.05) or b" " for _ in range(400))  # type: ignore[func-returns-value]

    started = time.monotonic()
    with Proxy(answer=drip) as proxy:
        [reply] = chat(proxy.url, timeout=0.5, retries=1).complete([ask("hello")])
    assert (reply.failure, proxy.hits) == ("server", 2)
    assert time.monotonic() - started < 5


def test_no_server_ends_the_whole_call() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(ModelError, match=r"127\.0\.0\.1.*is the server running\?"):
        chat(url, retries=1).complete([ask(str(n)) for n in range(20)])


def test_concurrency_holds_over_threads_and_a_callback_that_fails_ends_the_call() -> None:
    with Proxy(delay=0.1) as proxy:
        model = chat(proxy.url, concurrency=3)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda k: model.complete([ask(f"{k} {n}") for n in range(6)]), range(3)))
        assert (proxy.hits, proxy.most_busy) == (18, 3)

        def fail(index: int, reply: Reply) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.complete([ask(str(n)) for n in range(100)], fail)
        assert proxy.hits < 40


def test_what_is_sent() -> None:
    messages = (Message("system", "be brief"), Message("user", "hé \U0001f600"))
    fields: dict[str, Any] = {"extra_body": {"seed": 3, "temperature": None}, "thought_tokens": 900}
    with Proxy(answer=lambda _: (200, {}, completion('{"n": 1}'))) as proxy:
        chat(proxy.url, model="the/model", **fields).complete([Request(messages, "cues", max_tokens=7, schema=SCHEMA)])
    sent = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé \U0001f600"}]
    form = {"type": "json_schema", "json_schema": {"name": "cues", "schema": SCHEMA, "strict": True}}
    rest = {"max_tokens": 907, "seed": 3, "response_format": form}
    assert proxy.bodies[0] == {"model": "the/model", "messages": sent, **rest}


def test_the_server_gets_the_key_and_no_other_header_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ambient = {"OPENAI_ORG_ID": "org-PRIVATE", "OPENAI_CUSTOM_HEADERS": "X-Own: PRIVATE\nAuthorization: Bearer PRIVATE"}
    for name, value in {**ambient, "MY_KEY": "secret-0123456789"}.items():
        monkeypatch.setenv(name, value)
    with Proxy() as proxy:
        chat(proxy.url, key_env="MY_KEY").complete([ask("good")])
    assert proxy.heads[0]["authorization"] == "Bearer secret-0123456789"
    assert "PRIVATE" not in str(proxy.heads)


def test_keys_that_are_missing_or_not_meant_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match="OPENAI_API_KEY"):
        OpenAIChat(EndpointConfig("m"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-openai-only")
    with Proxy() as proxy:
        chat(proxy.url).complete([ask("hello")])
    assert "sk-for" not in str(proxy.heads)
    monkeypatch.setenv("OPENAI_API_KEY", '"sk-cut"')
    with pytest.raises(ModelError, match=r"holds a character no key has; is it cut or quoted wrongly\?$"):
        OpenAIChat(EndpointConfig("m"))


def test_a_redirect_is_not_followed() -> None:
    """The prompt would go to a host that nobody named."""
    with Proxy() as other:
        target = {"Location": f"{other.url}/chat/completions?sig=PRIVATE"}
        with Proxy(answer=lambda _: (307, target, b"")) as named:
            [reply] = chat(named.url).complete([ask("hello")])
    assert (reply.failure, named.hits, other.hits) == ("refused", 1, 0)
    assert "PRIVATE" not in reply.message
