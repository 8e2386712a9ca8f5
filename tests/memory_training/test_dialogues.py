"""Training on dialogues, with an expert, an answerer and a judge that a function plays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from scripted import FENCED, ScriptedChat, parts, services
from talking import ENCODER, LIFE, dialogue, questions, source

from remind.alignment.metrics import read_metrics
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Corpus
from remind.data.readers import write_refmem
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply, Request
from remind.memory.base import Query
from remind.memory.membuilder import MemBuilderSystem
from remind.memory_training import dialogues, pico, train
from remind.memory_training.config import (
    MemoryDataConfig,
    PolicyGradientConfig,
    RewardConfig,
    TrainMemoryConfig,
)
from remind.memory_training.membuilder import Scorer
from remind.memory_training.rewards import ROLES
from remind.testbed.memory_world import ORACLE


def expert() -> Callable[[Request], str]:
    """The memory world's expert without mistakes, in JSON. A bank numbers its entries by cosine."""
    lessons = pico.lessons(LIFE, ORACLE, most=20)
    replies = iter([(view, reply) for one in lessons for view, reply in zip(one.views, one.replies, strict=True)])

    def part(request: Request) -> str:
        view, reply = next(replies)
        ops = json.loads(view.as_json(reply))["ops"]
        shown = parts(request).get("entries", "").splitlines()
        for one in ops:
            if isinstance(one.get("old"), int):
                text = view.entries[one["old"] - 1].text
                one["old"] = next(n for n, line in enumerate(shown, 1) if line.endswith(text))
        return json.dumps({"ops": ops})

    return part


def answer(request: Request) -> str:
    """The memories as they are."""
    return "" if "nothing" in request.messages[-1].text else parts(request)["memories"]


def judge(request: Request) -> str:
    """Right where the gold answer is a part of the prediction."""
    given = parts(request)
    return json.dumps({"verdict": given["references"].removeprefix("1. ") in given["prediction"]})


def test_lessons_are_what_a_bank_asks_and_the_expert_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ScriptedChat(expert())
    made = source(
        monkeypatch, tmp_path / "talk.jsonl", memory=chat, answer=ScriptedChat(answer), judge=ScriptedChat(judge)
    )
    assert [one.id for one in made.questions] == ["a", "b", "c"]
    first, second = made.lessons(size, 10**6)
    assert [lesson.asks for lesson in (first, second)] == [2, 1]
    # an independent bank, whose model is played by the lessons
    told = iter([pair for lesson in (first, second) for pair in zip(lesson.views, lesson.replies, strict=True)])
    asked: list[Request] = []

    def part(request: Request) -> str:
        view, reply = next(told)
        asked.append(view.request())
        return reply

    again = ScriptedChat(part)
    with MemBuilderSystem().open(tmp_path / "b", LIFE.id, services(ENCODER, again)) as bank:  # type: ignore[arg-type]
        for lesson, session in zip((first, second), dialogue(LIFE).sessions, strict=True):
            assert lesson.state == bank.state()  # type: ignore[attr-defined]
            bank.ingest(session)
            assert lesson.examples == list(zip(lesson.views, lesson.replies, strict=True))
            state, proposed = pico.remember(lesson.state, lesson.dialogue, lesson.examples)
            # but for who made them
            kept = [one.text for role in ROLES for one in state.kept(role)]
            assert kept == [one.text for role in ROLES for one in bank.state().kept(role)]  # type: ignore[attr-defined]
            assert all(one.status == "applied" for own in proposed for one in own)
        assert again.asked == asked == chat.asked
        # what is retrieved: the block, then as many entries
        exam = first.examined.func.__self__  # type: ignore[attr-defined]
        for text in ("dog", "What is my pet now?", LIFE.meetings[0].turns[0].text):
            for top in (1, 3, 50):
                exam.top = top
                found = exam.memories(bank.state(), Query(text))  # type: ignore[attr-defined]
                same = bank.retrieve(Query(text), k=top + (found[0].kind == "core")).memories
                assert [one.id for one in found] == [one.id for one in same]
                assert [one.text for one in found] == [one.text for one in same]


def test_memories_are_worth_what_the_judge_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = {"memory": ScriptedChat(expert()), "answer": ScriptedChat(answer), "judge": ScriptedChat(judge)}
    first, _ = source(monkeypatch, tmp_path / "talk.jsonl", **chats).lessons(size, 10**6)
    turn = LIFE.meetings[0].turns[0].text
    held = json.dumps({"ops": [{"op": "ADD", "memory": f"2023: {turn}", "sources": [1]}]})
    none = [json.dumps({"ops": [{"op": "APPEND", "content": ""}]}), *[json.dumps({"ops": []})] * 3]
    rollouts = [[none[0], held, *none[2:]], none, [none[0], held, "no JSON", none[3]]]
    scorer = Scorer(first, RewardConfig(), lambda text: len(text))
    kept, empty, broken = scorer.results(rollouts)
    assert (kept.task, empty.task, broken.task) == (0.5, 0.0, 0.5)
    assert kept.retrieved == ("episodic", "episodic")
    assert kept.rewards["episodic"] == 0.5
    assert (broken.rewards["semantic"], broken.valid["semantic"]) == (0.0, False)
    assert kept.held_out is None
    # all answers of a group go out together, and an answer of nothing is wrong without a judge
    assert len(chats["answer"].asked) == 6
    assert len(chats["judge"].asked) == len([one for one in chats["answer"].asked if answer(one)])
    # a judge that gives no verdict
    chats["judge"].part = lambda request: Reply("", failure="timeout", message="too late")
    lost = scorer.result(rollouts[0])
    assert isnan(lost.task)
    assert isnan(lost.rewards["episodic"])


def size(view: dialogues.View) -> int:
    return len(view.request().messages[1].text)


def test_sessions_that_are_of_no_use_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(request: Request) -> Reply:
        return Reply("", failure="timeout", message="too late")

    def lessons(part: Any, longest: int) -> Any:
        return source(monkeypatch, tmp_path / "talk.jsonl", memory=ScriptedChat(part)).lessons(size, longest)

    first, second = (max(map(size, lesson.views)) for lesson in lessons(expert(), 10**6))
    assert "left out" not in capsys.readouterr().err
    (kept,) = lessons(expert(), max(first, second) - 1)
    assert max(map(size, kept.views)) == min(first, second)
    assert f"1 of 2 sessions has more than {max(first, second) - 1} tokens" in capsys.readouterr().err
    with pytest.raises(DataError, match="2 of 2 sessions has more than 9 tokens"):
        lessons(expert(), 9)
    # a role that does not reply
    play, count = expert(), iter(range(100))

    def once(request: Request) -> Any:
        said = play(request)
        return lost(request) if next(count) == 6 else said

    assert [len(lesson.examples) for lesson in lessons(once, 10**6)] == [4]
    assert "1 of 2 sessions are left out" in capsys.readouterr().err
    with pytest.raises(DataError, match="replies could not be had in any session"):
        lessons(lost, 10**6)


# the command


def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Expert, answerer and judge behind one server."""
    asked = "\n".join(str(message["content"]) for message in body["messages"])
    given = {name: text for name, _, text in FENCED.findall(asked)}
    form = body["messages"][0]["content"]
    if '"salient"' in form:
        said = json.dumps({"salient": True})
    elif '"profile"' in form and "entries" in given and "profile" not in given:
        said = json.dumps({"profile": given["entries"], "used": [1]})
    elif "turn" in given:
        said = json.dumps({"ops": [{"op": "ADD", "store": "fact", "text": given["turn"]}]})
    elif "conversation" in given or "profile" in given or "reply" in given:
        said = json.dumps({"accuracy": 0.5, "personalisation": None})
    elif "references" in given:
        said = json.dumps({"verdict": Random(given["prediction"]).random() < 0.5})
    elif "memories" in given:
        said = given["memories"][-40:]
    elif "block" in given or '"APPEND"' in asked:
        said = json.dumps({"ops": [{"op": "APPEND", "content": given["session"].splitlines()[0], "sources": [1]}]})
    else:
        said = json.dumps({"ops": [{"op": "ADD", "memory": given["session"].splitlines()[-1], "sources": [1]}]})
    return 200, {}, completion(said)


def config(tmp_path: Path, chat: Path, method: Any, url: str = "http://127.0.0.1:9/v1", **changes: Any) -> Any:
    write_refmem(Corpus((dialogue(LIFE),), tuple(questions(LIFE))), tmp_path / "talk.jsonl")
    given: dict[str, Any] = {
        "out": str(tmp_path / method),
        "method": method,
        "model": str(chat),
        "data": MemoryDataConfig(str(tmp_path / "talk.jsonl")),
        "llm": LLMConfig(EndpointConfig("m", url), cache=str(tmp_path / "llm.sqlite")),
        "rl": PolicyGradientConfig(group=2, reply_tokens=8),
    }
    return TrainMemoryConfig(**given | {"steps": 2, "batch_size": 1, "lr": 1e-2, "save_every": 1} | changes)


@pytest.mark.parametrize("method", ["sft", "adrpo", "salimory_sft", "salimory"])
def test_a_policy_is_trained_on_dialogues_and_goes_on_without_paying_again(
    method: str, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialogues, "SentenceEncoder", lambda: ENCODER)
    with Proxy(answer=play) as server:
        out = train.train_memory(config(tmp_path, chat, method, server.url))
        paid = server.paid.total()
        assert paid == len(server.paid)
        assert paid == 8 or method != "sft"
        assert "run-memory" in capsys.readouterr().out
        names = {"adrpo": {"task", "valid", "reward"}, "salimory": {"accuracy", "valid", "reward"}}
        assert names.get(method, set()) <= read_metrics(out)[0].keys()
        # the same again: all replies are in the cache
        again = train.train_memory(config(tmp_path, chat, method, server.url, out=str(tmp_path / "again")))
        one, two = ((folder / "policy/model.safetensors").read_bytes() for folder in (out, again))
        assert one == two
        assert server.paid.total() == paid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "pico"}, "pico knows the words of the memory world only"),
        ({"llm": LLMConfig()}, r"adrpo needs endpoints for llm\.memory, llm\.answer, llm\.judge \(or llm\.default\)"),
        ({"llm": LLMConfig(EndpointConfig("m", "local"), cache=None)}, "needs llm.cache"),
        ({"llm": LLMConfig(EndpointConfig("m", "local"), dry_run="x")}, "has no dry run"),
    ],
)
def test_settings_that_do_not_fit_dialogues(changes: dict[str, Any], message: str, tmp_path: Path, chat: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, chat, "adrpo", **changes)


def test_input_and_policies_that_dialogues_cannot_use(chat: Path, small: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path, chat, "adrpo")
    for changes, error, message in (
        ({"data": MemoryDataConfig(str(tmp_path / "none.jsonl"))}, DataError, "none.jsonl"),
        ({"data": replace(cfg.data, split="dev")}, DataError, "no question has evidence and a free"),
        ({"model": str(small)}, ModelError, "dialogues need an instruction model"),
    ):
        with pytest.raises(error, match=message):
            train.train_memory(replace(cfg, **changes))
    assert not (tmp_path / "adrpo").exists()


def test_questions_are_spread() -> None:
    asked = [replace(questions(LIFE)[0], id=str(n)) for n in range(7)]
    found = dialogues.asked_after(dialogue(LIFE), asked, 3)
    assert [[one.id for one in own] for own in found.values()] == [["0", "2", "4"]]
