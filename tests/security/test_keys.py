"""A key is sent to the server it is meant for and written nowhere, whatever the server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doc_server import reply
from fault_proxy import Proxy, completion, error
from in_process import run_module

KEY = "sk-secret-0123456789abcdef"


def echo(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A server that sends the key back: in a text, in an error, and in a header."""
    system = body["messages"][0]["content"]
    if '"understanding"' in system:
        return error(400, f"bad request, Authorization: Bearer {KEY}", **{"X-Echo": KEY})
    if "<answer>" in system + body["messages"][-1]["content"]:
        return 200, {"X-Echo": KEY}, completion(f"<answer>{KEY}</answer><explanation>{KEY}</explanation>")
    return reply(body)


def endpoint(stage: str, url: str) -> list[str]:
    fields = {"model": "m", "base_url": url, "key_env": "MY_SECRET_KEY", "retries": "0"}
    return [word for name, value in fields.items() for word in (f"--llm.{stage}.{name}", value)]


def test_a_key_is_in_nothing_that_is_written_or_printed(
    hostile: Path, tiny: Path, saes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States, replies in the cache, manifests, answers, verdicts and reports; also where the server fails."""
    monkeypatch.setenv("OPENAI_LOG", "debug")
    monkeypatch.setenv("MY_SECRET_KEY", KEY)
    states, out, replies = tmp_path / "states", tmp_path / "evaluation", ("--llm.cache", tmp_path / "replies.sqlite")
    build = ["--input", hostile / "data.jsonl", "--out", states, "--backbone", tiny, "--cache", tmp_path / "cache"]
    build += ["--sae", saes, "--max_failed", "1", *replies]
    answer = ["--states", states, "--model", "m", "--out", out, "--answers", "server", "--judge", "llm", *replies]
    with Proxy(answer=echo) as proxy:
        first = run_module("remind", "build-states", *build, *endpoint("default", proxy.url))
        endpoints = (*endpoint("answer", proxy.url), *endpoint("judge", proxy.url))
        second = run_module("remind", "evaluate", *answer, *endpoints)
        assert {head["authorization"] for head in proxy.heads} == {f"Bearer {KEY}"}
        assert not any(KEY in str(body) for body in proxy.bodies)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "bad request" in (states / "manifest.json").read_text()
    assert "[key]" in (out / "predictions.jsonl").read_text()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
    assert not any(KEY in text for text in (*first[1:], *second[1:]))
