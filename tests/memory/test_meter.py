"""The meter between systems and a fake server: what passes, what is counted, what is paid, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_samples import ask
from fault_proxy import Proxy, completion, error

from remind.core.errors import DataError
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.meter import Meter

pytestmark = pytest.mark.usefixtures("quick")
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def meter(url: str, folder: Path, **fields: Any) -> Meter:
    """A meter before the server at that address; cache and costs in the folder."""
    usual = {"model": "m", "base_url": url, "price_prompt": 1e6, "price_completion": 2e6}
    llm = LLMConfig(EndpointConfig(**{**usual, **fields}), cache=str(folder / "c.sqlite"))
    return Meter(llm, folder / "costs.jsonl")


def say(http: Any, text: str, **fields: Any) -> Any:
    """What a package's client gets."""
    client = openai.OpenAI(base_url="http://meter/v1", api_key="of-the-client", max_retries=0, http_client=http)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": "gpt-x", "messages": messages, "temperature": 0.7, **fields})


def words(reply: Any) -> str:
    return reply.choices[0].message.content


def test_totals_are_those_of_the_servers_own_log_and_faults_change_no_reply(tmp_path: Path) -> None:
    """A package and a system of ours in six threads, a third of the tries spoiled; the same again is free."""
    stages = ("extract", "update")
    work = [(name, f"conv {n % 2}/ü", stage, n) for name in ("mem0", "ours") for stage in stages for n in range(5)]
    with Proxy(share=0.3, seed=5, faults=("rate", "broken", "cut")) as proxy:
        m = meter(proxy.url, tmp_path, retries=20)

        def run(one: tuple[Any, ...]) -> str:
            system, dialogue, stage, number = one
            text = f"{system} {stage} {number}"
            if system == "mem0":
                return words(say(m.client(system, dialogue, stage), text))
            model = m.chat(system, dialogue, stage)
            assert model is not None
            return model.complete([ask(text)])[0].text

        with ThreadPoolExecutor(6) as pool, m.bar("mem0 conv", 1) as bar:
            replies = list(pool.map(run, work))
            assert bar.postfix == "20 requests", "they are counted while no step ends"
            hits = proxy.hits
            again = list(pool.map(run, work))
    rows, whole = m.ledger.groups("system", "dialogue", "stage"), m.ledger.summary()["total"]
    assert replies == again == [f"you said: {system} {stage} {n}" for system, _, stage, n in work]
    assert set(proxy.faults) == {"rate", "broken", "cut"}
    assert set(proxy.paid.values()) == {1}
    assert hits == proxy.hits == len(work) + proxy.faults.total()
    assert (whole["requests"], whole["cached"], whole["failures"]) == (40, 20, {})
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (10 * 20, 3 * 20)
    assert whole["cost_usd"] == pytest.approx(20 * (10 + 2 * 3))
    # by hand: of n = 0..4 three are even
    assert [row["cached"] for row in rows] == [3 if row["dialogue"] == "conv 0/ü" else 2 for row in rows]
    assert len(rows) == 2 * 2 * 2


def test_tools_and_formats_pass_unchanged_and_whole_replies_come_back(tmp_path: Path) -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "…"}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    whole = {"id": "9", "object": "chat.completion", "created": 5, "model": "m-2024", "choices": [choice]}
    whole["usage"] = {"prompt_tokens": 10, "completion_tokens": 3, "details": {"cached": 4}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "two?"}]}, message],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0.9,
        "max_completion_tokens": 77,
    }
    with Proxy(answer=lambda body: (200, {}, json.dumps(whole).encode())) as proxy:
        http = meter(proxy.url, tmp_path).client("langmem", "d", "extract")
        for _ in range(2):
            assert http.post("http://meter/v1/chat/completions", json=body).json() == whole
    assert proxy.bodies[0] == {**body, "model": "m", "temperature": 0.0}
    assert len(proxy.bodies) == 1, "the second is paid for"


def test_a_record_of_costs_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "costs.jsonl").write_text("no JSON\n")
    with pytest.raises(DataError, match=r"costs\.jsonl: is not a record of costs"):
        meter("http://127.0.0.1:9/v1", tmp_path)


def test_keys_are_neither_passed_on_nor_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = "secret-0123456789"
    monkeypatch.setenv("MY_KEY", key)

    def echo(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if body["messages"][0]["content"] == "bad":
            return error(400, f"you sent Bearer {key}")
        return 200, {}, completion(f"your key is {key}")

    with Proxy(answer=echo) as proxy:
        m = meter(proxy.url, tmp_path, key_env="MY_KEY")
        told = say(m.client("a", "d", "read"), "good").to_json()
        with pytest.raises(openai.BadRequestError) as refused:
            say(m.client("a", "d", "read"), "bad")
        told += str(refused.value) + m.table() + repr(vars(m))
    assert {head["authorization"] for head in proxy.heads} == {f"Bearer {key}"}
    assert "your key is [key]" in told
    contents = [told.encode(), *(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())]
    for one in (key, json.dumps(key)[1:-1], "of-the-client"):
        assert all(one.encode() not in content for content in contents)
    assert "of-the-client" not in str(proxy.heads)
