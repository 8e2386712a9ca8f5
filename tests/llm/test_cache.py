"""Replies are paid for once, whatever dies or runs beside it; costs, dry runs, a local model, endpoints."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_samples import ask
from fault_proxy import Proxy
from forked import Forked

from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError, ModelError
from remind.llm.client import Chats, OpenAIChat, ReplyCache
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import object_schema

KEY = "sk-secret-0123456789abcdef"


def test_the_ledger_adds_by_stage_and_endpoint() -> None:
    place = EndpointConfig("m", "http://h/v1", price_prompt=2.0, price_completion=10.0)
    paid = Reply("x", prompt_tokens=1_000_000, completion_tokens=100_000, seconds=4.0, calls=2, key="k1")
    recorded = Reply("x", prompt_tokens=500_000, seconds=2.0, calls=1, key="k2", cached=True)
    ledger, other = Ledger(), Ledger()
    ledger.add(ask("a", "cues", system="one"), paid, place)
    ledger.add(ask("b", "judge", system="one"), recorded, place)
    # the same request for another system, and a second time after it was paid for here: nothing is added
    ledger.add(ask("b", "judge", system="two"), recorded, place)
    ledger.add(ask("a", "cues", system="one"), replace(paid, cached=True), place)
    # what another process has counted
    other.add(ask("c", "judge"), Reply("", failure="server", calls=4, key="k3"), place)
    ledger.merge(json.loads(json.dumps(other.take())))
    summary = ledger.summary()
    sums = {"calls": 7, "prompt_tokens": 1_500_000, "completion_tokens": 100_000, "cost_usd": 4.0, "unknown_usage": 0}
    counts = {"requests": 5, "cached": 3, "failures": {"server": 1}, "seconds": {"p50": 2.0, "p95": 4.0}}
    assert {name: summary["total"][name] for name in (*sums, *counts)} == sums | counts
    assert (summary["total"]["now"]["calls"], summary["total"]["now"]["cost_usd"]) == (6, 3.0)
    assert (summary["stages"]["cues"]["cost_usd"], summary["stages"]["judge"]["calls"]) == (3.0, 5)
    # of what two systems ask for each has the costs
    assert [(row["system"], row["calls"]) for row in ledger.groups("system")] == [("", 4), ("one", 3), ("two", 1)]


def test_a_dry_run_writes_what_would_be_asked(tmp_path: Path) -> None:
    place = EndpointConfig("m", "http://127.0.0.1:9/v1", price_prompt=1e6, price_completion=2e6)
    path = tmp_path / "deep" / "prompts.jsonl"
    chats = Chats(LLMConfig(default=place, cache=str(tmp_path / "c.sqlite"), dry_run=str(path)))
    chat = chats.stage("judge")
    ReplyCache(tmp_path / "c.sqlite").put(chat.key_of(ask("known")), Reply("paid", None, 3, 1), "e", "judge")
    steps = {"type": "array", "minItems": 2, "items": {"type": "string"}}
    schema = object_schema(steps=steps, n={"type": "integer", "minimum": 3})
    same = ask("12345678", max_tokens=5)
    replies = chat.complete([same, ask("known"), same, ask("x", "cues", schema=schema)])
    assert (replies[1].text, replies[1].cached) == ("paid", True)
    assert replies[3].value == {"steps": ["-", "-"], "n": 3}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["12345678", "x"]
    assert lines[0]["prompt_tokens"] == 12
    judged = chats.ledger.summary()["stages"]["judge"]
    assert (judged["requests"], judged["cached"], judged["now"]["calls"], judged["now"]["cost_usd"]) == (3, 2, 1, 22)


def test_endpoints_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("default: {model: big, base_url: 'http://h:1/v1'}\ncues: {model: small}\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--cues.base_url", "http://i:2/v1"]
    cfg = parse(LLMConfig, "", [*words, "--judge.model", "wise", "--judge.extra_body", "{seed: 1}"])
    assert cfg.endpoint("summary") == EndpointConfig("big", "http://h:1/v1")
    assert cfg.endpoint("cues") == EndpointConfig("small", "http://i:2/v1")
    assert cfg.endpoint("judge") == EndpointConfig("wise", extra_body={"seed": 1})
    with pytest.raises(SystemExit):
        parse(LLMConfig, "", ["--judge.base_url", "http://me:pass@h/v1"])
    message = capsys.readouterr().err
    assert "keys come from the environment" in message
    assert (message.count("\n"), "pass@" in message) == (1, False)


def test_a_local_model_answers_as_generation_does_and_from_the_cache(tmp_path: Path) -> None:
    from remind.llm.client import LocalChat
    from remind.models.generate import generate

    place = EndpointConfig("nano-untrained", LOCAL, concurrency=2)
    chats = Chats(LLMConfig(default=place, cache=str(tmp_path / "c.sqlite")))
    chat = chats.stage("answer")
    assert isinstance(chat, LocalChat)
    texts = ["Where is Ann?", "What does Ben like to eat in the evening?", "Who?"]
    expected = generate(chat.backbone, texts, 5, batch_size=2)
    chat.complete([ask(text, max_tokens=5) for text in texts[:2]])
    replies = chat.complete([ask(text, max_tokens=5) for text in texts])
    assert [reply.text for reply in replies] == [output.text for output in expected if output]
    assert [reply.cached for reply in replies] == [True, True, False]
    assert chats.ledger.summary()["total"]["calls"] == 3
    assert chat.complete([ask("word " * 40_000, max_tokens=5)])[0].failure == "too_long"
    with pytest.raises(ModelError, match="greedily and takes no tools"):
        chat.complete([ask("x", temperature=1.0)])


@pytest.mark.parametrize("url", [f"user:{KEY}@h/v1", f"ftp://{KEY}/v1", f"https://h/v1?k={KEY}", f"https://h/v1#{KEY}"])
def test_what_may_be_a_key_is_refused_and_not_told(url: str) -> None:
    for name, value in (("base_url", url), ("key_env", KEY)):
        with pytest.raises(ConfigError, match=name) as refused:
            LLMConfig(EndpointConfig("m", **{name: value}))
        assert KEY not in str(refused.value)


def test_every_endpoint_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        LLMConfig(judge=EndpointConfig(base_url="http://[::1]:80/v1"))


def main(url: str, path: str, count: str, out: str, die_after: str = "0") -> None:
    """A process that asks, for tests of what processes share.

    Writes a line to OUT for each reply as it comes: index, whether it was cached, text. Kills itself with SIGKILL from
    inside the callback once DIE_AFTER replies were given out.
    """
    ledger, given = Ledger(), []
    endpoint = EndpointConfig("m", url, name="test", concurrency=4, timeout=60, price_prompt=1e6)
    requests = [ask(f"question {n}", sample=f"s{n}", max_tokens=4) for n in range(int(count))]
    if gate := os.environ.get("GATE"):
        Path(f"{out}.ready").touch()
        until(Path(gate).exists)
    with Path(out).open("a", encoding="utf-8", buffering=1) as file:

        def on_reply(index: int, reply: Reply) -> None:
            file.write(json.dumps([index, reply.cached, reply.text]) + "\n")
            given.append(index)
            if len(given) == int(die_after):
                os.kill(os.getpid(), signal.SIGKILL)

        OpenAIChat(endpoint, ReplyCache(path), ledger).complete(requests, on_reply)
        file.write(json.dumps(ledger.summary()["total"]) + "\n")


def start(*words: object) -> Forked:
    return Forked(Path(__file__), *words)


def rows(out: Path) -> list[Any]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def until(true: Callable[[], object], seconds: float = 300) -> None:
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_a_killed_run_pays_for_no_answer_twice(tmp_path: Path) -> None:
    cache, count = tmp_path / "c.sqlite", 40
    with Proxy(share=0.3, seed=3, delay=0.01, faults=("rate", "broken", "malformed")) as proxy:
        first = start(proxy.url, cache, count, tmp_path / "a", 15)
        assert first.wait(300) == -signal.SIGKILL
        reported = rows(tmp_path / "a")
        until(lambda: proxy.busy == 0)
        paid = proxy.paid.total()
        assert start(proxy.url, cache, count, tmp_path / "b").wait(300) == 0
    *replies, total = rows(tmp_path / "b")
    assert sorted(row[::2] for row in replies) == [[n, f"you said: question {n}"] for n in range(count)]
    # what was reported was committed, and none of that was paid for again
    assert {row[0] for row in reported} <= {row[0] for row in replies if row[1]}
    asked = {row[0]: proxy.paid[json.dumps([{"role": "user", "content": f"question {row[0]}"}])] for row in replies}
    assert all(asked[row[0]] == 1 for row in reported)
    # the kill may lose replies that were under way, at most one per place
    cached = sum(row[1] for row in replies)
    assert 0 <= paid - cached <= 4
    assert proxy.paid.total() == count + paid - cached
    # the books of the second run are those of both
    assert (total["prompt_tokens"], total["now"]["prompt_tokens"]) == (10 * count, 10 * (count - cached))


def test_two_processes_at_once_pay_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, count = tmp_path / "c.sqlite", 12
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    # slow enough that the second is there long before the first is through
    with Proxy(delay=1.0) as proxy:
        both = [start(proxy.url, cache, count, tmp_path / name) for name in "ab"]
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in "ab"))
        (tmp_path / "gate").touch()
        assert [process.wait(300) for process in both] == [0, 0]
    assert proxy.hits == proxy.paid.total() == count
    for name in "ab":
        assert dict(row[::2] for row in rows(tmp_path / name)[:-1]) == {
            n: f"you said: question {n}" for n in range(count)
        }
    assert sum(rows(tmp_path / name)[-1]["now"]["calls"] for name in "ab") == count


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello " * 1000)
    with closing(sqlite3.connect(tmp_path / "other")) as db, db:
        db.execute("CREATE TABLE replies (a)")
    for name in ("text", "other"):
        with pytest.raises(DataError, match="cannot be"):
            ReplyCache(tmp_path / name).get("k")


def test_keys_differ_with_all_that_shapes_a_reply() -> None:
    def key_of(request: Request, place: EndpointConfig) -> str:
        return OpenAIChat(place).key_of(request)

    request, place = ask("hello"), EndpointConfig("m", "http://host/v1")
    key = key_of(request, place)
    # as it has been from the first on: a change would make all that was paid for unknown
    assert key == "cb2455123f4d02004e41d6e3a4932ab22cc748b97832282c64b3d164f7337dca"
    same = {"retries": 1, "timeout": 3, "concurrency": 2, "price_prompt": 1}
    assert key_of(ask("hello", stage="cues", sample="x", prompt_id="y"), place) == key
    assert key_of(request, replace(place, **same, base_url="http://host/v1/")) == key
    fields = [{"max_tokens": 3}, {"temperature": 0.5}, {"schema": {}}, {"messages": (Message("system", "hello"),)}]
    others = [replace(request, **one) for one in fields]  # type: ignore[arg-type]
    places = [replace(place, model="n"), replace(place, base_url="http://o/v1"), replace(place, extra_body={"seed": 1})]
    keys = {key, *(key_of(one, place) for one in others), *(key_of(request, one) for one in places)}
    assert len(keys) == 1 + len(others) + len(places)


if __name__ == "__main__":
    main(*sys.argv[1:])
