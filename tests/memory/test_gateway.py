"""The meter's HTTP server where something is wrong: with the request, with the server behind it, with a key."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chat_samples import ask
from fault_proxy import Proxy, completion, error
from metering import meter, openai, say, send

from remind.core.errors import ConfigError, ModelError
from remind.memory.gateway import MAX_BYTES
from remind.memory.meter import Meter

pytestmark = pytest.mark.usefixtures("quick")


def test_refusals_are_passed_on(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        status = int(body["messages"][0]["content"])
        said = {"message": "no", "type": "kind", "param": "p", "code": "some_code"}
        return status, {}, json.dumps({"error": said}).encode()

    with Proxy(answer=answer) as proxy, meter(proxy.url, tmp_path, retries=1) as m:
        url = m.url("mem0", "d", "extract")
        for status, tries in ((400, 1), (401, 1), (404, 1), (422, 1), (429, 2), (500, 2), (503, 2)):
            before = proxy.hits
            with pytest.raises(openai.APIStatusError) as refused:
                say(url, str(status))
            assert refused.value.status_code == status
            assert f"HTTP {status}" in refused.value.body["message"]
            # the client sends nothing a second time: all tries were made behind the meter
            assert proxy.hits - before == tries
        # a lone surrogate, which JSON can spell and UTF-8 cannot
        lone = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        code, said = send(url, f"{urlsplit(url).path}/chat/completions", lone)
        assert (code, said["error"]["type"]) == (400, "invalid_request_error")
        assert "cannot be sent" in said["error"]["message"]
        total = m.report()["total"]
    assert total["failures"] == {"refused": 5, "server": 3}
    assert (total["calls"], total["cost_usd"]) == (8, 0)


def test_no_server_is_an_error_of_the_gateway(tmp_path: Path) -> None:
    with Proxy() as gone:
        url = gone.url
    with meter(url, tmp_path, retries=0) as m:
        with pytest.raises(openai.InternalServerError, match="is the server running") as refused:
            say(m.url("mem0", "d", "extract"), "x")
        assert refused.value.status_code == 502
        with pytest.raises(ModelError, match="is the server running"):
            m.chat("rag", "d", "read").complete([ask("x")])
        assert {row["system"]: row["failures"] for row in m.report()["systems"]} == {"mem0": {"server": 1}}


@pytest.fixture(scope="module")
def serving() -> Iterator[Meter]:
    with meter("http://127.0.0.1:9/v1") as m:
        yield m


@pytest.mark.parametrize(
    ("path", "body", "heads", "status", "said"),
    [
        ("/s/d/extract/v1/chat/completions", {"stream": True}, {}, 400, "not streamed"),
        ("/s/d/extract/v1/chat/completions", {"max_tokens": True}, {}, 400, "max_tokens must be"),
        ("/s/d/extract/v1/chat/completions", b'{"messages": [', {}, 400, "is not JSON"),
        ("/s/d/extract/v1/chat/completions", b'{"messages": NaN}', {}, 400, "NaN"),
        ("/s/d/extract/v1/chat/completions", b"[" * 100_000, {}, 400, "is not JSON"),
        ("/s/d/extract/v1/chat/completions", b" " * (3 * MAX_BYTES), {}, 413, "8,388,608 bytes"),
        ("/s/d/gossip/v1/chat/completions", b" " * (3 * MAX_BYTES), {}, 404, "unknown stage"),
        ("/s/d/extract/v1/chat/completions", {}, {"Content-Length": "-1"}, 411, "Content-Length"),
        ("/s/d/extract/v1/chat/completions", {}, {"Content-Type": "text/plain"}, 415, "application/json"),
        ("/s/d/extract/v1/chat/completions", {}, {"Host": "evil.example"}, 403, "127.0.0.1"),
        ("/s/d/extract/v1/embeddings", {"input": "x", "encoding_format": "int8"}, {}, 400, "float or base64"),
        ("/v1/chat/completions", {}, {}, 404, "/{system}/{dialogue}/{stage}/v1"),
        ("/s/d/gossip/v1/chat/completions", {}, {}, 404, "unknown stage 'gossip'"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    serving: Meter, path: str, body: Any, heads: dict[str, str], status: int, said: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"messages": [{"role": "user"}], **body}).encode()
    url = serving.url("s", "d", "extract")
    got, reply = send(url, path, content, **heads)
    assert got == status
    assert said in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    # the server goes on, and has counted nothing
    assert send(url, "/s/d/read/v1/models", None, "GET")[0] == 200
    assert send(url, "/s/d/read/v1/other", None, "GET")[0] == 404
    assert serving.report()["rows"] == []


def test_names_and_patterns_of_no_use_are_refused(serving: Meter) -> None:
    for system, dialogue, stage in (("", "d", "read"), ("s", "..", "read"), ("s", "d", "gossip")):
        for make in (serving.url, serving.chat):
            with pytest.raises(ConfigError):
                make(system, dialogue, stage)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with block"):
        meter("http://h/v1").url("s", "d", "read")
    for pattern in ("(", "a*"):
        with pytest.raises(ConfigError, match="normalise"):
            meter("http://h/v1", normalise=[pattern])
    with pytest.raises(ConfigError, match="no model is named"):
        meter("http://h/v1", model="")


def test_keys_are_neither_passed_on_nor_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = 'secret-"01\\23456789'
    monkeypatch.setenv("MY_KEY", key)
    caplog.set_level(logging.DEBUG, "remind")

    def echo(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if body["messages"][0]["content"] == "bad":
            return error(400, f"you sent Bearer {key}")
        return 200, {}, completion(f"your key is {key}")

    with Proxy(answer=echo) as proxy, meter(proxy.url, tmp_path, key_env="MY_KEY") as m:
        told = say(m.url("a", "d", "read"), "good").to_json()
        with pytest.raises(openai.BadRequestError) as refused:
            say(m.url("a", "d", "read"), "bad")
        told += str(refused.value) + json.dumps(m.report()) + m.table() + repr(vars(m)) + caplog.text
    assert {head["authorization"] for head in proxy.heads} == {f"Bearer {key}"}
    assert "your key is [key]" in told
    contents = [told.encode(), *(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())]
    for one in (key, json.dumps(key)[1:-1], "of-the-client"):
        assert all(one.encode() not in content for content in contents)
    assert "of-the-client" not in str(proxy.heads)
