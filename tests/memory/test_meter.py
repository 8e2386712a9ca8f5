"""The meter between clients of OpenAI's protocol and a fake server: what passes, what is counted and what is paid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from chat_samples import ask
from fault_proxy import Proxy, completion
from metering import SCHEMA, TOOL, client, meter, openai, say, send, words
from words import WordEncoder

from remind.core.errors import DataError
from remind.llm.endpoints import LOCAL
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request

pytestmark = pytest.mark.usefixtures("quick")
METERED = Path(__file__).with_name("metered.py")


def test_totals_are_those_of_the_servers_own_log_and_faults_change_no_reply(tmp_path: Path) -> None:
    """Two systems in six threads, a third of the tries spoiled; the same again is free."""
    work = [
        (system, f"conv {n % 2}/ü", stage, f"{system} {stage} {n}")
        for system in ("mem0", "a-mem")
        for stage in ("extract", "update")
        for n in range(5)
    ]
    with (
        Proxy(share=0.3, seed=5, faults=("rate", "broken", "cut")) as proxy,
        meter(proxy.url, tmp_path, retries=20) as m,
    ):

        def run(one: tuple[str, ...]) -> str:
            system, dialogue, stage, text = one
            return words(say(m.url(system, dialogue, stage), text))  # type: ignore[arg-type]

        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(run, work))
            hits = proxy.hits
            again = list(pool.map(run, work))
        report = m.report()
        table = m.table()
    assert replies == again == [f"you said: {text}" for *_, text in work]
    assert set(proxy.faults) == {"rate", "broken", "cut"}
    assert set(proxy.paid.values()) == {1}
    total = report["total"]
    assert total["now"]["calls"] == total["calls"] == len(work)
    assert hits == proxy.hits == len(work) + proxy.faults.total()
    assert (total["requests"], total["cached"], total["failures"]) == (40, 20, {})
    assert (total["prompt_tokens"], total["completion_tokens"]) == (10 * 20, 3 * 20)
    assert total["cost_usd"] == pytest.approx(20 * (10 + 2 * 3))
    # by hand: of n = 0..4 three are even
    for row in report["rows"]:
        count = 3 if row["dialogue"] == "conv 0/ü" else 2
        assert (row["requests"], row["cached"], row["prompt_tokens"]) == (2 * count, count, 10 * count)
    assert len(report["rows"]) == 2 * 2 * 2
    assert sum(row["calls"] for row in report["rows"]) == sum(row["calls"] for row in report["systems"]) == 20
    assert [line.split()[:2] for line in table.splitlines()[1:3]] == [["a-mem", "extract"], ["a-mem", "update"]]
    assert json.loads(json.dumps(report)) == report


def test_tools_and_formats_pass_unchanged_and_whole_replies_come_back(tmp_path: Path) -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "…"}
    whole = {
        "id": "chatcmpl-9", "object": "chat.completion", "created": 5, "model": "m-2024", "system_fingerprint": "fp",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "details": {"cached": 4}},
    }  # fmt: skip
    body = {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "two?"}]}, message],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        "parallel_tool_calls": False,
        "temperature": 0.9,
        "max_completion_tokens": 77,
        "seed": 4,
        "stream": False,
    }
    with (
        Proxy(answer=lambda body: (200, {}, json.dumps(whole).encode())) as proxy,
        meter(proxy.url, tmp_path) as first,
        meter(proxy.url, temperature=0.5, max_tokens=9, extra_body={"seed": None, "top_k": 1}) as other,
    ):
        for m in (first, first, other):
            path = urlsplit(m.url("langmem", "d", "extract")).path
            status, reply = send(m.url("x", "y", "read"), f"{path}/chat/completions", json.dumps(body).encode())
            assert (status, reply) == (200, whole)
        parsed = say(first.url("langmem", "d", "extract"), "x", tools=[TOOL]).choices[0].message.tool_calls[0]
    assert (parsed.function.name, json.loads(parsed.function.arguments)) == ("add", {"n": 3})
    assert proxy.bodies[0] == {**body, "model": "m", "temperature": 0.0}
    own = {name: value for name, value in body.items() if name not in ("seed", "max_completion_tokens")}
    assert proxy.bodies[1] == {**own, "model": "m", "temperature": 0.5, "max_tokens": 9, "top_k": 1}
    assert len(proxy.bodies) == 3


def test_embeddings_are_those_of_the_encoder(tmp_path: Path) -> None:
    texts = ["one two three", "ü", "one two three"]
    expected = WordEncoder(4).encode_apart(texts)
    with meter("http://127.0.0.1:9/v1", tmp_path) as m:
        one = client().with_options(base_url=m.url("mem0", "d", "update"))
        # the package asks for base64 where no form is named
        for form in ({}, {"encoding_format": "float"}):
            reply = one.embeddings.create(model="text-embedding-3-small", input=texts, **form)
            assert torch.equal(torch.tensor([row.embedding for row in reply.data]), expected)
            assert reply.usage.prompt_tokens == 7
        assert one.embeddings.create(model="x", input="word", dimensions=4).data[0].index == 0
        assert [model.id for model in one.models.list()] == ["m", "words"]
        for wrong in ({"input": [[1, 2]]}, {"input": "x", "dimensions": 3}, {"input": []}):
            with pytest.raises(openai.BadRequestError, match=r"ids of tokens|dimensions must be 4"):
                one.embeddings.create(model="x", **wrong)
        rows = {row["system"]: row["embeddings"] for row in m.report()["systems"]}
    del rows["mem0"]["seconds"]
    # the refused dimensions were encoded before they were known to be wrong
    assert rows["mem0"] == {"calls": 4, "texts": 8, "tokens": 16}


def test_a_killed_process_pays_for_no_reply_twice(tmp_path: Path) -> None:
    with Proxy(delay=0.01) as proxy:
        process = subprocess.Popen([sys.executable, METERED, proxy.url, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert [words(say(url, text)) for text in "abc"] == [f"you said: {text}" for text in "abc"]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        # as if it had been killed while it wrote its last line, with the reply in the cache
        costs = tmp_path / "costs.jsonl"
        costs.write_bytes(costs.read_bytes()[:-9])
        with meter(proxy.url, tmp_path, name="test", price_completion=0) as m:
            for text in "acd":
                assert words(say(m.url("mem0", "conv-1", "extract"), text)) == f"you said: {text}"
            total = m.report()["total"]
        assert proxy.hits == 4
    # a and b stand in the record, also where a is asked for again; c was found in the cache
    assert (total["calls"], total["now"]["calls"], total["prompt_tokens"], total["cost_usd"]) == (4, 1, 40, 40)
    assert len(costs.read_text().splitlines()) == 5
    with meter(proxy.url, tmp_path, name="test") as m:
        after = m.report()["total"]
    assert (after["calls"], after["now"]["calls"], after["requests"]) == (4, 0, 5)
    costs.write_text('{"system": "x"}\n')
    with pytest.raises(DataError, match=r"costs\.jsonl \[line 1\]: is not a record"):
        meter(proxy.url, tmp_path)


def test_equal_requests_under_way_are_asked_once_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Ledger.add

    def late(self: Ledger, request: Request, reply: Reply, *rest: Any) -> None:
        """The one that has paid is the last to be counted."""
        time.sleep(0 if reply.cached else 0.3)
        add(self, request, reply, *rest)

    monkeypatch.setattr(Ledger, "add", late)
    with Proxy(delay=0.3) as proxy, meter(proxy.url, tmp_path) as m, ThreadPoolExecutor(4) as pool:
        urls = [m.url(system, "d", "extract") for system in ("one", "one", "two", "two")]
        assert {words(reply) for reply in pool.map(lambda url: say(url, "same"), urls)} == {"you said: same"}
        report = m.report()
    assert proxy.hits == 1
    total, (one, two) = report["total"], report["systems"]
    assert (total["calls"], total["prompt_tokens"], total["requests"], total["cached"]) == (1, 10, 4, 3)
    # whoever paid: each of the two would have by itself
    assert [row["prompt_tokens"] for row in (one, two)] == [10, 10]


def test_concurrency_holds_over_clients(tmp_path: Path) -> None:
    with Proxy(delay=0.05) as proxy, meter(proxy.url, tmp_path, concurrency=2) as m, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: say(m.url(f"s{n % 3}", "d", "extract"), str(n)), range(12)))
    assert (proxy.hits, proxy.most_busy) == (12, 2)


def test_our_own_systems_are_counted_in_the_same_books(tmp_path: Path) -> None:
    answers = iter(['{"n": 4}'])

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        asked = body["messages"][0]["content"]
        return 200, {}, completion(next(answers) if asked == "count" else asked)

    with Proxy(answer=answer) as proxy, meter(proxy.url, tmp_path) as m:
        rmm, lme = m.chat("rmm", "d", "update"), m.chat("lme", "d", "facts")
        seen: list[int] = []
        requests = [ask("a", "cues"), ask("count", schema=SCHEMA), ask("a")]
        replies = rmm.complete(requests, lambda index, reply: seen.append(index))
        assert (replies[0].text, replies[1].value, sorted(seen)) == ("a", {"n": 4}, [0, 1, 2])
        assert lme.complete([ask("a")])[0].cached
        assert words(say(m.url("mem0", "d", "read"), "a")) == "a"
        rows = m.report()["rows"]
    counts = {
        (row["system"], row["stage"]): (row["requests"], row["calls"], row["prompt_tokens"], row["now"]["calls"])
        for row in rows
    }
    assert counts == {
        ("rmm", "update"): (3, 2, 20, 2),
        ("lme", "facts"): (1, 1, 10, 0),
        ("mem0", "read"): (1, 1, 10, 1),
    }
    assert proxy.hits == 3
    assert (rmm.name, json.loads((tmp_path / "costs.jsonl").read_text().splitlines()[0])["system"]) == (
        f"m@{proxy.url}",
        "rmm",
    )


def test_a_dry_run_sends_nothing_and_writes_what_it_would(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    with Proxy() as proxy:
        with meter(proxy.url, tmp_path) as m:
            say(m.url("mem0", "d", "extract"), "paid")
        with meter(proxy.url, tmp_path, dry_run=path) as m:
            url = m.url("mem0", "d", "extract")
            assert words(say(url, "paid")) == "you said: paid"
            assert "dry run" in words(say(url, "new", max_tokens=7))
            assert "dry run" in words(say(url, "new", max_tokens=7))
            assert json.loads(words(say(url, "json", response_format={"type": "json_object"}))) == {}
            report, table = m.report(), m.table()
        assert proxy.hits == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["messages"][-1]["content"] for line in lines] == ["new", "json"]
    assert {(line["system"], line["dialogue"], line["stage"]) for line in lines} == {("mem0", "d", "extract")}
    assert lines[0]["max_tokens"] == 7
    total = report["total"]
    assert (total["requests"], total["cached"], total["completion_tokens"]) == (4, 2, 3 + 7 + 1024)
    assert total["now"]["prompt_tokens"] == sum(line["prompt_tokens"] for line in lines)
    assert total["now"]["cost_usd"] == pytest.approx(sum(line["cost_usd_at_most"] for line in lines))
    assert report["dry_run"] == str(path)
    assert str(path) in table
    # estimates are no costs
    assert len((tmp_path / "costs.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_local_model_answers(tmp_path: Path) -> None:
    with meter(LOCAL, tmp_path, model="nano-untrained") as m:
        url = m.url("mem0", "d", "extract")
        parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Ann?"}]
        talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        first = say(url, "", messages=talk, max_tokens=4)
        own = m.chat("ours", "d", "extract")
        messages = (Message("system", "Be brief."), Message("user", "Where is Ann?"))
        (reply,) = own.complete([Request(messages, "extract", max_tokens=4)])
        assert (words(first), reply.cached) == (reply.text, True)
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (reply.prompt_tokens, 4)
        assert first.choices[0].finish_reason == "length"
        for fields in ({"tools": [TOOL]}, {"messages": [{"role": "tool", "content": "x"}]}):
            with pytest.raises(openai.BadRequestError, match="a local model takes no"):
                say(url, "x", **fields)
        with pytest.raises(openai.BadRequestError) as long:
            say(url, "word " * 40_000, max_tokens=4)
        assert long.value.code == "context_length_exceeded"
        assert m.report()["total"]["calls"] == 1
