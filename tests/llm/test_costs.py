"""Costs, JSON in replies, dry runs, a local model, and endpoints from the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from chat_samples import ask

from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError
from remind.llm.cache import ReplyCache
from remind.llm.client import Chats
from remind.llm.dry import DryChat, DryRun
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import Message, Reply


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
    assert other.summary()["total"]["requests"] == 0
    summary = ledger.summary()
    sums = {"calls": 7, "prompt_tokens": 1_500_000, "completion_tokens": 100_000, "cost_usd": 4.0, "unknown_usage": 0}
    counts = {"requests": 5, "cached": 3, "failures": {"server": 1}, "seconds": {"p50": 2.0, "p95": 4.0}}
    assert {name: summary["total"][name] for name in (*sums, *counts)} == sums | counts
    now = {"calls": 6, "prompt_tokens": 1_000_000, "completion_tokens": 100_000, "cost_usd": 3.0, "unknown_usage": 0}
    assert summary["total"]["now"] == now
    assert (summary["stages"]["cues"]["cost_usd"], summary["stages"]["judge"]["calls"]) == (3.0, 5)
    assert list(summary["endpoints"]) == ["m@http://h/v1"]
    assert [line.split()[0] for line in table(summary).splitlines()] == ["stage", "cues", "judge", "total"]
    # of what two systems ask for each has the costs
    assert [(row["system"], row["calls"]) for row in ledger.groups("system")] == [("", 4), ("one", 3), ("two", 1)]


def test_a_dry_run_writes_what_would_be_asked(tmp_path: Path) -> None:
    place = EndpointConfig("m", "http://127.0.0.1:9/v1", price_prompt=1e6, price_completion=2e6)
    path = tmp_path / "deep" / "prompts.jsonl"
    chats = Chats(LLMConfig(default=place, cache=str(tmp_path / "c.sqlite"), dry_run=str(path)))
    chat, run = chats.stage("judge"), chats.dry
    assert isinstance(chat, DryChat)
    assert run is not None
    ReplyCache(tmp_path / "c.sqlite").put(chat.key_of(ask("known")), Reply("paid", None, 3, 1), "e", "judge")
    properties = {
        "steps": {"type": "array", "minItems": 2, "items": {"type": "string"}},
        "option": {"type": "string", "enum": ["B", "C"]},
        "n": {"type": "integer", "minimum": 3},
        "fine": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    same = ask("12345678", max_tokens=5)
    requests = [same, ask("known"), same, ask("x", "cues", schema=schema)]
    seen: list[int] = []
    replies = chat.complete(requests, lambda index, reply: seen.append(index))
    assert sorted(seen) == [0, 1, 2, 3]
    assert (replies[1].text, replies[1].cached) == ("paid", True)
    assert replies[3].value == {"steps": ["-", "-"], "option": "B", "n": 3, "fine": False}
    assert all(reply.failure is None for reply in replies)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["12345678", "x"]
    assert lines[0]["prompt_tokens"] == 2 + 4
    judged = chats.ledger.summary()["stages"]["judge"]
    assert (judged["requests"], judged["cached"], judged["now"]["calls"], judged["now"]["cost_usd"]) == (3, 2, 1, 16)
    assert "nothing was asked" in run.report()
    with pytest.raises(DataError, match=r"prompts\.jsonl"):
        DryRun(path / "below", Ledger())


def test_endpoints_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "llm:\n  default: {model: big, base_url: 'http://h:1/v1', price_prompt: 2}\n  cues: {model: small}\n"
    )
    words = ["--out", "o", "--config", str(file), "--llm.cues.base_url", "http://i:2/v1", "--llm.judge.model", "wise"]
    cfg = parse(Config, "", [*words, "--llm.judge.extra_body", "{seed: 1}", "--llm.cache", "null"]).llm
    assert cfg.endpoint("summary") == EndpointConfig("big", "http://h:1/v1", price_prompt=2)
    assert cfg.endpoint("cues") == EndpointConfig("small", "http://i:2/v1")
    assert cfg.endpoint("judge") == EndpointConfig("wise", extra_body={"seed": 1})
    assert cfg.cache is None
    assert parse(Config, "", ["--out", "o"]).llm.endpoint("judge") is None


def test_mistakes_on_the_command_line_are_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["--llm.judge.retries", "-1"], "llm.judge.retries: Input should be greater than or equal to 0"),
        (["--llm.judge.base_url", "http://me:pass@h/v1"], "keys come from the environment"),
        (["--llm.judge.colour", "red"], "colour"),
    ):
        with pytest.raises(SystemExit):
            parse(Config, "", ["--out", "o", *words])
        message = capsys.readouterr().err
        assert reason in message
        assert message.count("\n") == 1
        assert "pass@" not in message
    with pytest.raises(ConfigError, match="no model is named"):
        LLMConfig(judge=EndpointConfig(base_url="http://h/v1"))


def test_stages_share_what_they_can(tmp_path: Path) -> None:
    one, two = EndpointConfig("a", "http://h/v1"), EndpointConfig("b", "http://h/v1")
    chats = Chats(LLMConfig(default=one, judge=two, cache=str(tmp_path / "c.sqlite")))
    cues, summary, judge = (chats.stage(name) for name in ("cues", "summary", "judge"))
    assert cues is summary
    assert judge is not None
    assert judge.name == "b@http://h/v1"
    assert Chats(LLMConfig()).stage("cues") is None


def test_a_local_model_answers_as_generation_does_and_from_the_cache(tmp_path: Path) -> None:
    from remind.llm.local import LocalChat, as_prompt
    from remind.models.generate import generate

    place = EndpointConfig("nano-untrained", LOCAL, concurrency=2)
    chats = Chats(LLMConfig(default=place, cache=str(tmp_path / "c.sqlite")))
    chat = chats.stage("answer")
    assert isinstance(chat, LocalChat)
    texts = ["Where is Ann?", "What does Ben like to eat in the evening?", "Who?"]
    expected = generate(chat.backbone, texts, 5, batch_size=2)
    first = chat.complete([ask(text, max_tokens=5) for text in texts[:2]])
    seen: list[int] = []
    replies = chat.complete([ask(text, max_tokens=5) for text in texts], lambda index, reply: seen.append(index))
    assert [reply.text for reply in replies] == [output.text for output in expected if output]
    assert [reply.cached for reply in replies] == [True, True, False]
    assert [reply.text for reply in first] == [reply.text for reply in replies[:2]]
    assert sorted(seen) == [0, 1, 2]
    assert chats.ledger.summary()["total"]["calls"] == 3
    hot, long = chat.complete([ask("x", temperature=1.0), ask("word " * 40_000, max_tokens=5)])
    assert (hot.failure, long.failure) == ("refused", "too_long")
    (tools,) = chat.complete([replace(ask("x"), body={"messages": [], "tools": []})])
    assert (tools.failure, tools.message) == ("refused", "a local model takes no tools; name a chat server")
    strict = chat.complete([ask("x", max_tokens=4, schema={"type": "object"})])[0]
    assert (strict.failure, strict.calls) == ("invalid", 1)
    talk = (Message("system", "S"), Message("user", "U"), Message("assistant", "A"), Message("user", "V"))
    assert as_prompt(talk[:2]) == "S\n\nU"
    assert as_prompt(talk) == "S\n\nRequest:\nU\n\nYour reply:\nA\n\nRequest:\nV"
