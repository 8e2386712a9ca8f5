"""The cache of replies: nothing is paid for twice, whatever dies or runs beside it."""

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

from remind.core.errors import DataError
from remind.llm.client import OpenAIChat, ReplyCache
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request


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
