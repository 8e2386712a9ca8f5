"""Training on dialogues, with an expert, an answerer and a judge that a function plays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from scripted import FENCED, ScriptedChat, parts, services
from words import WordEncoder

from remind.alignment.metrics import read_metrics
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Corpus, Dialogue, Question
from remind.data.readers import write_refmem
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply, Request
from remind.memory.base import Query
from remind.memory.membuilder import MemBuilderSystem
from remind.memory.operations import BANKS, Entry
from remind.memory.salimory import SaliMorySystem
from remind.memory_training import dialogues, train
from remind.memory_training.config import (
    MemoryDataConfig,
    PolicyGradientConfig,
    RewardConfig,
    SaliMoryConfig,
    TrainMemoryConfig,
)
from remind.memory_training.episodes import together
from remind.memory_training.membuilder import Scorer
from remind.memory_training.rewards import Played
from remind.models.nano import nano_tokenizer
from remind.testbed.memory_world import make_life

ENCODER = WordEncoder(dimension=64)
TALK = Dialogue("life", tuple(meeting.session for meeting in make_life(0, 21, 2).meetings))
FIRST, SECOND = (session.turns[0] for session in TALK.sessions)
#: Of the first session two, of the second one that needs both, and some that are of no use.
ASKED = [
    Question("a", "life", "What was said first?", answers=(FIRST.text,), evidence=(FIRST.id,)),
    Question("b", "life", "And what, again?", answers=("never",), evidence=(FIRST.id,)),
    Question("c", "life", "What was said later?", answers=(SECOND.text,), evidence=(SECOND.id, FIRST.id)),
]
USELESS = [replace(ASKED[0], id="d", evidence=()), replace(ASKED[0], id="e", answers=())]


def reply(given: dict[str, str], form: str) -> Any:
    """Of the expert as any role, the answerer and the judge, by what they are given."""
    if '"salient"' in form:
        return {"salient": len(given["turn"]) % 3 > 0}
    if '"profile"' in form and "entries" in given and "profile" not in given:
        return {"profile": given["entries"], "used": [1]}
    if "turn" in given:
        return {"ops": [{"op": "ADD", "store": "fact", "text": given["turn"].partition(": ")[2]}]}
    if "conversation" in given:
        return {"entries": [{"factual": n > 0, "vague": n == 1} for n, _ in enumerate(given["memory"].splitlines())]}
    if "profile" in given:
        return {"score": 0.3}
    if "reply" in given:
        return {"accuracy": 0.7, "personalisation": 0.5}
    if "references" in given:
        return {"verdict": given["references"].removeprefix("1. ") in given["prediction"]}
    if "block" in given or '"APPEND"' in form:
        return {"ops": [{"op": "APPEND", "content": given["session"].splitlines()[0], "sources": [1]}]}
    told = f"2023-03-10: {given['session'].splitlines()[-1]}"
    return {"ops": [{"op": "ADD", "memory": told, "sources": [1]}]}


def said(form: str) -> str:
    given = {name: text for name, _, text in FENCED.findall(form)}
    return given["memories"] if "memories" in given else json.dumps(reply(given, form))


def part(request: Request) -> str:
    return said("\n".join(one.text for one in request.messages))


def lost(request: Request) -> Reply:
    return Reply("", failure="timeout", message="too late")


def size(view: dialogues.View) -> int:
    return len(view.request().messages[1].text)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dialogues.Source]:
    write_refmem(Corpus((TALK,), (*ASKED, *USELESS)), tmp_path / "talk.jsonl")
    monkeypatch.setattr(dialogues, "SentenceEncoder", lambda: ENCODER)

    def make(**models: ScriptedChat) -> dialogues.Source:
        monkeypatch.setattr(dialogues.Chats, "stage", lambda self, stage: models[stage])
        return dialogues.Source(MemoryDataConfig(str(tmp_path / "talk.jsonl")), LLMConfig(), list(models))  # type: ignore[arg-type]

    return make


def test_lessons_are_what_a_bank_asks_and_the_expert_replies(source: Any, tmp_path: Path) -> None:
    chat, again = ScriptedChat(part), ScriptedChat(part)
    made = source(memory=chat, answer=ScriptedChat(part), judge=ScriptedChat(part))
    assert [one.id for one in made.questions] == ["a", "b", "c"]
    lessons = made.lessons(size, 10**6)
    assert [lesson.asks for lesson in lessons] == [2, 1]
    with MemBuilderSystem().open(tmp_path / "b", "life", services(ENCODER, again)) as bank:  # type: ignore[arg-type]
        for lesson, session in zip(lessons, TALK.sessions, strict=True):
            assert lesson.state == bank.state()  # type: ignore[attr-defined]
            bank.ingest(session)
            assert lesson.examples == list(zip(lesson.views, lesson.replies, strict=True))
        assert again.asked == [view.request() for lesson in lessons for view in lesson.views] == chat.asked
        # what is retrieved: the block, then as many entries
        query = Query("What is my pet now?")
        found = dialogues.nearest(ENCODER, 3, bank.state(), query)  # type: ignore[arg-type,attr-defined]
        same = bank.retrieve(query, k=3 + (found[0].kind == "core")).memories
        assert [one.text for one in found] == [one.text for one in same]


def test_memories_are_worth_what_the_judge_says(source: Any) -> None:
    chats = {name: ScriptedChat(part) for name in ("memory", "answer", "judge")}
    first, _ = source(**chats).lessons(size, 10**6)
    held = json.dumps({"ops": [{"op": "ADD", "memory": f"2023: {FIRST.text}", "sources": [1]}]})
    none = [json.dumps({"ops": [{"op": "APPEND", "content": ""}]}), *[json.dumps({"ops": []})] * 3]
    rollouts = [[none[0], held, *none[2:]], none, [none[0], held, "no JSON", none[3]]]
    scorer = Scorer(first, RewardConfig(), len)
    kept, empty, broken = scorer.results(rollouts)
    assert (kept.task, empty.task, broken.task) == (0.5, 0.0, 0.5)
    assert kept.retrieved == ("episodic", "episodic")
    assert (broken.rewards["semantic"], broken.valid["semantic"]) == (0.0, False)
    # all answers of a group go out together
    assert len(chats["answer"].asked) == 6
    # a judge that gives no verdict
    chats["judge"].part = lost
    assert isnan(scorer.results(rollouts)[0].rewards["episodic"])


def test_sessions_that_are_of_no_use_are_left_out(source: Any, capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(100))
    once = ScriptedChat(lambda request: lost(request) if next(count) == 6 else part(request))
    (kept,) = source(memory=once).lessons(size, 10**6)
    assert not source(memory=ScriptedChat(part)).lessons(size, max(map(size, kept.views)) - 1)
    told = capsys.readouterr().err
    assert "1 of 2 sessions are left out" in told
    assert "2 of 2 sessions are left out: a prompt has more than" in told


# SaliMory


def test_an_episode_is_what_a_bank_of_salimory_does(tmp_path: Path) -> None:
    asks = replace(ASKED[0], time="2023-06-01")
    run = dialogues.play(TALK, asks)
    ((played, traces),) = together([run], lambda steps: [part(one.request()) for one in steps])
    chat = ScriptedChat(part)
    with SaliMorySystem().open(tmp_path / "b", "life", services(ENCODER, chat)) as bank:  # type: ignore[arg-type]
        for session in TALK.sessions:
            bank.ingest(session)
        (memory,) = bank.retrieve(Query.of(asks), k=1).memories
        kept = bank.state().current(*BANKS)  # type: ignore[attr-defined]
    assert [one.request().messages for one, _ in traces] == [one.messages for one in chat.asked]
    assert [(one.store, one.text, one.sources) for one in played.bank] == [(o.store, o.text, o.sources) for o in kept]
    assert (played.profiles, len(played.valid)) == (memory.text, len(traces))


def test_rollouts_are_worth_what_the_judge_grades(source: Any) -> None:
    chats = {"answer": ScriptedChat(lambda _: "a dog"), "judge": ScriptedChat(part)}
    task = dialogues.SaliMoryDialoguesTask(
        source(**chats), nano_tokenizer(), SaliMoryConfig(turns=4, personalisation=0.9)
    )
    assert (len(task), len(task.rows[0][0].turns)) == (3, 4)
    talk, question = task.rows[0]
    gold = question.evidence[0]
    entries = tuple(Entry(f"m{n}", "fact", f"text {n}", sources=(gold,)) for n in range(4))
    other = next(turn.id for turn in talk.turns if turn.id != gold)
    rollouts = [Played(entries, (gold, other), (True, False), "a profile"), Played((), (), (True,), "")]
    found = task.score(0, rollouts)
    # φ_f = 3/4, φ_v = 1/4; κ = .4 · 1/2 + .6 · 1
    gamma = 0.75 * 0.75
    expected = 0.7 * (1 + 0.9 * 0.5) + (-0.5 * (1 - gamma) + 0.3 * gamma) + 0.15 * 0.3 + 0.1 * 0.8
    # who has no profile is asked all the same; its answer counts, its memory costs the whole penalty
    assert found.rewards["booster"] == pytest.approx([expected, 0.7 * (1 + 0.9 * 0.5) - 0.5])
    assert [(one.role, one.winner, one.loser) for one in found.pairs] == [("booster", 0, 1)]
    # not applicable, in other words
    given = json.dumps({"accuracy": "0.7", "personalisation": "n/a"})
    chats["judge"].part = lambda request: given if "reply" in parts(request) else part(request)
    assert task.score(0, rollouts).rewards["booster"][1] == pytest.approx(0.7 - 0.5)
    # an answerer that fails
    chats["answer"].part = lost
    assert all(map(isnan, task.score(0, rollouts).rewards["booster"]))


# the command


def config(tmp_path: Path, chat: Path, method: Any, url: str = "http://127.0.0.1:9/v1", **changes: Any) -> Any:
    given = {"out": str(tmp_path / method), "method": method, "model": str(chat), "steps": 2, "batch_size": 1}
    given["data"] = MemoryDataConfig(str(tmp_path / "talk.jsonl"))
    given["llm"] = LLMConfig(EndpointConfig("m", url), cache=str(tmp_path / "llm.sqlite"))
    return TrainMemoryConfig(**given | {"rl": PolicyGradientConfig(group=2, reply_tokens=8)} | changes)


@pytest.mark.parametrize("method", ["sft", "adrpo", "salimory_sft", "salimory"])
def test_a_policy_is_trained_on_dialogues_and_again_without_paying(
    method: str, chat: Path, source: Any, tmp_path: Path
) -> None:
    def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, completion(said("\n".join(str(message["content"]) for message in body["messages"])))

    with Proxy(answer=play) as server:
        out = train.train_memory(config(tmp_path, chat, method, server.url))
        paid = server.paid.total()
        assert "sft" in method or {"valid", "reward"} <= read_metrics(out)[0].keys()
        again = train.train_memory(config(tmp_path, chat, method, server.url, out=str(tmp_path / "again")))
        one, two = ((folder / "policy/model.safetensors").read_bytes() for folder in (out, again))
        assert one == two
        assert server.paid.total() == paid == len(server.paid)


def test_what_dialogues_cannot_use(chat: Path, small: Path, source: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adrpo needs endpoints for llm\.memory, llm\.answer, llm\.judge \(or"):
        config(tmp_path, chat, "adrpo", llm=LLMConfig())
    cfg = config(tmp_path, chat, "adrpo")
    with pytest.raises(DataError, match="no question has evidence and a free"):
        train.train_memory(replace(cfg, data=replace(cfg.data, split="dev")))
    with pytest.raises(ModelError, match="dialogues need an instruction model"):
        train.train_memory(replace(cfg, model=str(small)))
    assert not (tmp_path / "adrpo").exists()
