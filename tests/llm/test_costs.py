"""Costs, dry runs, a local model, and endpoints from the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from chat_samples import ask

from remind.core.cli import parse
from remind.core.errors import ConfigError, ModelError
from remind.llm.client import Chats, ReplyCache
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Reply
from remind.llm.structured import object_schema

KEY = "sk-secret-0123456789abcdef"


@dataclass
class Config:
    """A script's configuration."""

    out: str
    """A folder."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoints."""


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
    (tmp_path / "c.yaml").write_text("llm: {default: {model: big, base_url: 'http://h:1/v1'}, cues: {model: small}}")
    words = ["--out", "o", "--config", str(tmp_path / "c.yaml"), "--llm.cues.base_url", "http://i:2/v1"]
    cfg = parse(Config, "", [*words, "--llm.judge.model", "wise", "--llm.judge.extra_body", "{seed: 1}"]).llm
    assert cfg.endpoint("summary") == EndpointConfig("big", "http://h:1/v1")
    assert cfg.endpoint("cues") == EndpointConfig("small", "http://i:2/v1")
    assert cfg.endpoint("judge") == EndpointConfig("wise", extra_body={"seed": 1})
    with pytest.raises(SystemExit):
        parse(Config, "", ["--out", "o", "--llm.judge.base_url", "http://me:pass@h/v1"])
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
