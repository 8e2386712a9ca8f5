"""SaliMory on dialogues: an episode is what a bank does, and is worth what a judge grades."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted import ScriptedChat, parts, services
from talking import ENCODER, dialogue, source

from remind.data.dialogue import Question
from remind.llm.request import Reply, Request
from remind.memory.base import Query
from remind.memory.operations import Entry
from remind.memory.proposals import BANKS
from remind.memory.salimory import SCHEMAS, SaliMorySystem
from remind.memory_training import dialogues
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.episodes import together
from remind.models.nano import nano_tokenizer
from remind.testbed.memory_world import make_life


def roles(request: Request) -> str:
    """Filter, booster and utilizer: what they reply is a function of what they are asked."""
    given, draw = parts(request), Random(str(parts(request)))
    if request.schema == SCHEMAS["utilizer"]:
        count = len(given["entries"].splitlines())
        return json.dumps({"profile": given["entries"], "used": [draw.randint(1, count)]})
    if request.schema == SCHEMAS["filter"]:
        return json.dumps({"salient": draw.random() < 0.7})
    text = given["turn"].partition(": ")[2]
    count = len(given.get("entries", "").splitlines())
    stores = [line.split("(")[1].split(")")[0] for line in given.get("entries", "").splitlines()]
    target = draw.randint(1, count) if count else 0
    op = draw.choice(["ADD", "ADD", "UPDATE", "DELETE", "NOOP"] if count else ["ADD"])
    one: dict[str, Any] = {"op": op}
    if op != "NOOP":
        one["store"] = stores[target - 1] if op in ("UPDATE", "DELETE") else draw.choice(["fact", "working"])
    one |= {"target": target} if op in ("UPDATE", "DELETE") else {}
    one |= {"text": text} if op in ("ADD", "UPDATE") else {}
    return json.dumps({"ops": [one]})


@pytest.mark.parametrize("number", [3, 21])
def test_an_episode_is_what_a_bank_of_salimory_does(number: int, tmp_path: Path) -> None:
    life = make_life(0, number, 3)
    whole = dialogue(life)
    asks = Question("q", life.id, "What is my pet?", answers=("dog",), evidence=(whole.turns[0].id,), time="2023-06-01")
    asked: list[Request] = []

    def answer(steps: Any) -> list[str]:
        asked.extend(one.request() for one in steps)
        return [roles(one.request()) for one in steps]

    (played,) = together([dialogues.play(whole, asks)], answer)
    chat = ScriptedChat(roles)
    with SaliMorySystem().open(tmp_path / "b", life.id, services(ENCODER, chat)) as bank:  # type: ignore[arg-type]
        for session in whole.sessions:
            bank.ingest(session)
        (memory,) = bank.retrieve(Query.of(asks), k=1).memories
        kept = bank.state().current(*BANKS)  # type: ignore[attr-defined]
    assert [one.messages for one in asked] == [one.messages for one in chat.asked]
    assert [(one.store, one.text, one.sources) for one in played.bank] == [(o.store, o.text, o.sources) for o in kept]
    assert played.profiles == memory.text
    assert set(played.flagged) >= {turn for one in kept for turn in one.sources}
    assert len(played.valid) == len(asked)


GRADES = {"response": {"accuracy": 0.7, "personalisation": 0.5}, "profile": {"score": 0.3}}


def grade(request: Request) -> str:
    given = parts(request)
    if "conversation" in given:
        count = len(given["memory"].splitlines())
        return json.dumps({"entries": [{"factual": n > 0, "vague": n == 1} for n in range(count)]})
    return json.dumps(GRADES["profile" if "profile" in given else "response"])


def test_rollouts_are_worth_what_the_judge_grades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = {"answer": ScriptedChat(lambda _: "a dog"), "judge": ScriptedChat(grade)}
    made = source(monkeypatch, tmp_path / "talk.jsonl", **chats)
    task = dialogues.SaliMoryDialoguesTask(made, nano_tokenizer(), SaliMoryConfig(turns=4))
    assert len(task) == 3
    talk, question = task.rows[0]
    assert len(talk.turns) == 4
    gold = question.evidence[0]
    entries = tuple(Entry(f"m{n}", "fact", f"text {n}", sources=(gold,)) for n in range(4))
    some = dialogues.Played(entries, (gold, talk.turns[1].id), (True, False), "a profile")
    none = dialogues.Played((), (), (True,), "")
    found = task.score(0, [some, none])
    # φ_f = 3/4, φ_v = 1/4; κ = .4 · 1/2 + .6 · 1
    gamma = 0.75 * 0.75
    expected = 0.7 * (1 + 0.45 * 0.5) + (-0.5 * (1 - gamma) + 0.3 * gamma) + 0.15 * 0.3 + 0.1 * 0.8
    assert found.rewards["filter"] == found.rewards["booster"] == found.rewards["utilizer"]
    # who has no profile is asked all the same; its answer counts, its memory costs the whole penalty
    assert found.rewards["booster"] == pytest.approx([expected, 0.7 * (1 + 0.45 * 0.5) - 0.5])
    assert [(one.role, one.winner, one.loser) for one in found.pairs] == [("booster", 0, 1)]
    assert len(chats["judge"].asked) == 4
    # a judge that does not grade every entry, one that fails, and an answerer that does
    chats["judge"].part = lambda request: grade(request) if "conversation" not in parts(request) else '{"entries": []}'
    assert isnan(task.score(0, [some, none]).rewards["booster"][0])
    chats["judge"].part = grade
    chats["answer"].part = lambda request: Reply("", failure="timeout", message="too late")
    assert all(map(isnan, task.score(0, [some, none]).rewards["booster"]))


def test_what_is_imitated_could_be_read_and_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = ScriptedChat(lambda request: "well" if Random(str(parts(request))).random() < 0.2 else roles(request))
    made = source(monkeypatch, tmp_path / "talk.jsonl", memory=spoilt)
    pairs = list(dialogues.imitated(made, 16))
    replies = {request.messages: spoilt.part(request) for request in spoilt.asked}
    assert {one.role for one, _ in pairs} == {"filter", "booster", "utilizer"}
    assert 0 < len(pairs) < len(spoilt.asked)
    assert all(replies[one.request().messages] == reply != "well" for one, reply in pairs)
