"""The cache of replies: nothing is paid for twice, whatever dies or runs beside it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

pytest.importorskip("openai", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")
pytest.importorskip("jsonschema", reason="the extra llm is not installed: pip install 'remind-toolkit[llm]'")

from fault_proxy import Proxy, completion, error
from forked import Forked

from remind.core.errors import DataError
from remind.llm.batch import key_of
from remind.llm.cache import ReplyCache, Spent
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request

Ask = Callable[..., Request]
Endpoint = Callable[..., EndpointConfig]
ASKER = Path(__file__).with_name("asker.py")


def start(url: str, cache: Path, count: int, out: Path, *die: int) -> Forked:
    return Forked(ASKER, url, cache, count, out, *die)


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
    assert sorted(row[0] for row in replies) == list(range(count))
    assert all(row[2] == f"you said: question {row[0]}" for row in replies)
    # what was reported was committed, and none of that was paid for again
    assert {row[0] for row in reported} <= {row[0] for row in replies if row[1]}
    asked = {row[0]: proxy.paid[json.dumps([{"role": "user", "content": f"question {row[0]}"}])] for row in replies}
    assert all(asked[row[0]] == 1 for row in reported)
    # the kill may lose replies that were under way, at most one per place
    under_way = paid - sum(row[1] for row in replies)
    assert 0 <= under_way <= 4
    assert proxy.paid.total() == count + under_way
    # the books of the second run are those of both
    assert total["prompt_tokens"] == 10 * count
    assert total["cost_usd"] == pytest.approx(10 * count)
    assert total["now"]["prompt_tokens"] == 10 * (count - sum(row[1] for row in replies))


def test_two_processes_at_once_pay_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, count = tmp_path / "c.sqlite", 30
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    # slow enough that the second is there long before the first is through
    with Proxy(delay=1.0) as proxy:
        both = [start(proxy.url, cache, count, tmp_path / name) for name in "ab"]
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in "ab"))
        (tmp_path / "gate").touch()
        assert [process.wait(300) for process in both] == [0, 0]
    assert proxy.hits == proxy.paid.total() == count
    for name in "ab":
        *replies, total = rows(tmp_path / name)
        assert sorted((row[0], row[2]) for row in replies) == sorted(
            (n, f"you said: question {n}") for n in range(count)
        )
        assert total["calls"] == count
    own = [rows(tmp_path / name)[-1]["now"]["calls"] for name in "ab"]
    assert sum(own) == count
    assert min(own) > 0


def test_a_process_waits_for_one_that_asks_and_takes_over_when_it_is_killed(tmp_path: Path) -> None:
    cache = tmp_path / "c.sqlite"
    slow = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        slow.wait(60)
        return 200, {}, completion("well")

    with Proxy(answer=answer) as proxy:
        first = start(proxy.url, cache, 1, tmp_path / "a")
        until(lambda: proxy.hits == 1)
        second = start(proxy.url, cache, 1, tmp_path / "b")
        with pytest.raises(TimeoutExpired):
            second.wait(3)
        assert proxy.hits == 1
        first.kill()
        first.wait()
        # long before the lease would have ended by itself
        until(lambda: proxy.hits == 2, 20)
        slow.set()
        assert second.wait(300) == 0
    assert rows(tmp_path / "b")[0] == [0, False, "well", None]


def test_leases_end_where_the_owner_cannot_be_seen(tmp_path: Path) -> None:
    one, two = (ReplyCache(tmp_path / "c.sqlite", lease=0.6) for _ in range(2))
    two._machine = "elsewhere"
    assert one.claim("k") is True
    assert two.claim("k") is False
    time.sleep(1.0)
    assert two.claim("k") is False  # renewed, since its owner lives
    one.close()
    time.sleep(0.8)
    assert two.claim("k") is True
    two.release("k")
    assert one.claim("k") is True
    one.put("k", Reply("yes"), "e", "judge")
    held = two.claim("k")
    assert isinstance(held, Reply)
    assert held.text == "yes"


def test_what_comes_back_is_what_was_put(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "c.sqlite")
    reply = Reply("naïve \U0001f600\n", None, 7, 5, False, 1.25, 3)
    cache.release("k", Spent(2, 1, 0, 0.5))
    cache.put("k", reply, "e", "cues")
    cache.put("k", Reply("another", None, 7, 5), "e", "cues")
    cache.close()
    entry = ReplyCache(cache.path).lookup(["k", "absent"])
    assert list(entry) == ["k"]
    assert entry["k"].reply == reply
    assert entry["k"].spent == Spent(5, 15, 10, 1.75)


def test_keys_differ_with_all_that_shapes_a_reply(ask: Ask, endpoint: Endpoint) -> None:
    request, place = ask("hello"), endpoint("http://host/v1")
    key = key_of(request, place)
    same = [
        (ask("hello", stage="cues", sample="x", prompt_id="y"), place),
        (request, replace(place, retries=1, timeout=3, concurrency=2, price_prompt=1, key_env="OTHER")),
        (request, replace(place, base_url="http://host/v1/")),
        (request, replace(place, structured=True)),
    ]
    assert {key_of(*pair) for pair in same} == {key}
    others = [
        (ask("hello "), place),
        (ask("hello", max_tokens=3), place),
        (ask("hello", temperature=0.5), place),
        (ask("hello", schema={}), place),
        (replace(request, messages=(Message("system", "hello"),)), place),
        (replace(request, messages=(Message("user", "hel"), Message("user", "lo"))), place),
        (request, replace(place, model="n")),
        (request, replace(place, base_url="http://other/v1")),
        (request, replace(place, extra_body={"seed": 1})),
    ]
    assert len({key, *(key_of(*pair) for pair in others)}) == len(others) + 1
    assert OpenAIChat(place).name == place.title
    assert OpenAIChat(replace(place, extra_body={"seed": 1})).name not in (place.title, OpenAIChat(place).name)
    named = replace(place, name="mine")
    assert key_of(request, named) == key_of(request, replace(named, base_url="http://moved:9/v1"))


def test_failures_are_asked_again_and_invalid_replies_are_not(
    quick: None, tmp_path: Path, ask: Ask, endpoint: Endpoint
) -> None:
    ways = {"busy": error(503, "busy"), "bad": error(400, "bad"), "long": error(400, "context length")}

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return ways.get(body["messages"][0]["content"], (200, {}, completion("no json")))

    requests = [ask("busy"), ask("bad"), ask("long"), ask("odd", schema={"type": "object"})]
    seen = []
    with Proxy(answer=answer) as proxy:
        for _ in range(2):
            ledger = Ledger()
            cache = ReplyCache(tmp_path / "c.sqlite")
            replies = OpenAIChat(endpoint(proxy.url, retries=1, price_prompt=1e6), cache, ledger).complete(requests)
            seen.append((proxy.hits, [reply.failure for reply in replies], replies[3], ledger.summary()["total"]))
            cache.close()
    kinds = ["server", "refused", "too_long", "invalid"]
    assert [row[1] for row in seen] == [kinds, kinds]
    assert [row[0] for row in seen] == [2 + 1 + 1 + 2, 2 * (2 + 1 + 1) + 2]
    first, second = seen[0][2], seen[1][2]
    assert (first.calls, second.calls, second.cached, second.text) == (2, 0, True, first.text)
    assert second.message == first.message
    assert seen[1][3]["failures"] == {"invalid": 1, "refused": 1, "server": 1, "too_long": 1}
    # the tries of the first run are in the second's books
    assert (seen[0][3]["calls"], seen[1][3]["calls"], seen[1][3]["now"]["calls"]) == (6, 10, 4)


def test_a_kill_between_reply_and_repair_loses_neither(tmp_path: Path, ask: Ask, endpoint: Endpoint) -> None:
    broken = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if len(body["messages"]) == 1:
            return 200, {}, completion("no json")
        return (200, {}, completion("{}")) if broken.is_set() else error(400, "out of order")

    request = ask("odd", schema={"type": "object"})
    with Proxy(answer=answer) as proxy:
        chat = OpenAIChat(endpoint(proxy.url), ReplyCache(tmp_path / "c.sqlite"))
        assert chat.complete([request])[0].failure == "refused"
        broken.set()
        reply = chat.complete([request])[0]
        assert (reply.value, reply.calls, reply.cached, reply.prompt_tokens) == ({}, 1, False, 20)
        assert chat.complete([request])[0].cached
    assert [len(body["messages"]) for body in proxy.bodies] == [1, 3, 3]


def test_a_thousand_requests_from_the_cache(tmp_path: Path, ask: Ask, endpoint: Endpoint) -> None:
    requests = [ask(f"{n} " + "words " * 500, sample=str(n)) for n in range(1000)]
    place = endpoint("http://127.0.0.1:9/v1")
    cache = ReplyCache(tmp_path / "c.sqlite")
    for request in requests:
        cache.put(key_of(request, place), Reply(f"reply {request.sample}", None, 500, 3, True, 0.4, 1), "e", "judge")
    ledger, seen = Ledger(), []
    chat = OpenAIChat(place, ReplyCache(cache.path), ledger)
    started = time.process_time()
    replies = chat.complete(requests, lambda index, reply: seen.append(index))
    assert time.process_time() - started < 5
    assert seen == list(range(1000))
    assert [reply.text for reply in replies] == [f"reply {n}" for n in range(1000)]
    assert all(reply.cached and reply.calls == 0 for reply in replies)
    total = ledger.summary()["total"]
    assert (total["calls"], total["now"]["calls"], total["seconds"]["p95"]) == (1000, 0, 0.4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_opens_a_connection_of_its_own(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "c.sqlite")
    assert cache.claim("parent") is True
    child = os.fork()
    if child == 0:
        fine = cache.claim("parent") is False and cache.claim("child") is True
        cache.put("child", Reply("from the child"), "e", "judge")
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.lookup(["child"])["child"].reply == Reply("from the child")


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello " * 1000)
    with pytest.raises(DataError, match="text"):
        ReplyCache(text)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE replies (a)")
    other.commit()
    other.close()
    with pytest.raises(DataError, match="something else"):
        ReplyCache(tmp_path / "other.sqlite")
    with pytest.raises(DataError, match="cannot be"):
        ReplyCache(text / "below" / "c.sqlite")
