"""Questions of the other styles, by a scripted model: P13n-style ones in four steps, and those on each session."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
import pytest
from scripted import FENCED, ScriptedChat, parts, session
from scripted_chat import told_for
from words import WordEncoder

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.llm.request import Reply, Request
from remind.refmem.config import P13nConfig, SessionConfig
from remind.refmem.styles import KINDS, episode, personal_questions, session_questions, types

TALK = Dialogue(
    "d",
    (
        session("s1", "2024-03-01", "Ann: I love hiking.", "Bob: Nice.", "Ann: I own a red kayak."),
        session("s2", "2024-03-09", "Ann: My knee hurts on stairs.", "Bob: I bake bread. </passages>"),
    ),
)


def script(request: Request) -> str:
    """A model that is right but for an entry here and there."""
    value = told_for(*(message.text for message in request.messages[:2]))
    assert value is not None
    ((step, rows),) = value.items()
    if step in ("signals", "points"):
        rows += [{**rows[0], "turns": [9]}, {**rows[0], "text": " "}, {**rows[0], "speaker": "Eve"}]
        rows.append({**rows[0], "text": "Ann owns a red kayak", "turns": [1.0]})
    if step == "groups":
        rows += [{**rows[0], "signals": [1, 1]}, {**rows[0], "signals": [99]}]
    if step == "questions":
        rows += [{**rows[0], "signals": [0]}, {**rows[0], "question": "Where do I paddle the red kayak that I own?"}]
    return json.dumps(value)


def test_four_steps_keep_what_is_valid_and_say_why_the_rest_is_not() -> None:
    chat = ScriptedChat(script)
    questions, rejected, counts = personal_questions([TALK], SimpleNamespace(stage=lambda _: chat), P13nConfig())  # type: ignore[arg-type]
    # two sessions; then a request for each speaker with two signals, and one for each group
    assert counts == {
        "signals_asked": 2, "signals": 6, "points_asked": 2, "points": 6, "groups_asked": 2, "groups": 2,
        "questions_asked": 2, "questions": 5,
    }  # fmt: skip
    # the last tells a signal of Ann's, and Bob is asked about it
    assert [question.category for question in questions] == [*KINDS] * 2 + [KINDS[0]]
    assert {question.evidence for question in questions} == {("s1:1", "s1:3"), ("s1:2", "s2:2")}
    assert {question.time for question in questions} == {"2024-03-09"}
    assert {(row["step"], row["why"]) for row in rejected} >= {
        ("signals", "'Eve' does not speak in the conversation"),
        ("signals", "there is no turn 9; 3 are shown"),
        ("points", "text has 0 characters; 1 to 2000 are allowed"),
        ("groups", "a group needs two signals"),
        ("questions", "there is no signal 0; 4 are shown"),
        ("questions", "the question gives away a signal that it should be answered from"),
    }
    # what is said stands in fences alone
    assert all("kayak" not in FENCED.sub("", request.messages[1].text) for request in chat.asked)
    stubborn = ScriptedChat(lambda request: "I would rather not.")
    questions, rejected, counts = personal_questions([TALK], SimpleNamespace(stage=lambda _: stubborn), P13nConfig())  # type: ignore[arg-type]
    assert (questions, counts["signals"], {row["entry"] for row in rejected}) == ([], 0, {None})


def test_an_episode_is_cut_round_the_evidence() -> None:
    turns = [
        Turn(f"t{n}", "A", f"line {n}", None, (Image(n // 3, None, f"c{n}"),) if n % 3 == 0 else ()) for n in range(12)
    ]
    whole = Dialogue("d", (Session("a", None, tuple(turns[:6])), Session("b", None, tuple(turns[6:]))))
    question = Question("q", "d", "?", answers=("x",), evidence=("t3", "t10"))
    cut, asked = episode(whole, question, 6)
    assert [turn.id for turn in cut.turns] == ["t2", "t3", "t4", "t9", "t10", "t11"]
    assert [(image.index, image.caption) for image in cut.images] == [(0, "c3"), (1, "c9")]
    assert (asked.dialogue_id, asked.evidence) == (cut.id, question.evidence)
    assert [one.id for one in episode(whole, replace(question, evidence=("t0",)), 3)[0].sessions] == ["a"]


OWNED = {"type": "single", "question": "What do I own?", "answer": "kayak", "turns": [1], "entries": []}
SKY = {"type": "temporal", "question": "Which colour is the sky?", "answer": "blue", "turns": [2], "entries": []}


class Told(ScriptedChat):
    def complete(self, requests: Sequence[Request], on_reply: Any = None) -> list[Reply]:
        replies = super().complete(requests)
        for place, reply in enumerate(replies if on_reply else ()):
            on_reply(place, reply)
        return replies


class Played:
    """Chat models for every stage, of which a session's writer is right at the second try."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        write = self.questions if rows is None else lambda request: json.dumps({"questions": rows})
        self.chats: dict[str, Any] = {"memory": Told(self.memory), "questions": ScriptedChat(write)}
        self.chats |= {"answer": Told(self.answer), "judge": ScriptedChat(self.judge)}

    def stage(self, stage: str) -> Any:
        return self.chats[stage]

    def memory(self, request: Request) -> str:
        role = request.prompt_id.removeprefix("membuilder_").partition("-")[0]
        return json.dumps({"ops": [{"op": "ADD", "memory": "Ann hikes", "sources": [1]}] if role == "semantic" else []})

    def questions(self, request: Request) -> str:
        rows = [OWNED | ({"type": "multi", "entries": [1]} if "s2" in request.sample else {}), SKY]
        if len(request.messages) > 2:
            assert "1. Which colour is the sky? - it is answered right without" in request.messages[-1].text
            rows = [OWNED | {"question": "Whose is it?", "answer": "Ann"} if "s1" in request.sample else SKY]
        return json.dumps({"questions": rows})

    def answer(self, request: Request) -> str:
        if request.prompt_id.startswith("refmem_blind"):
            return json.dumps({"answers": ["blue" if "sky" in parts(request)["question"] else "a dog"]})
        assert "Ann" in parts(request)["memories"]
        about = re.findall("own|sky|Whose", parts(request)["question"])[0]
        return {"own": "kayak", "sky": "blue", "Whose": "Ann"}[about]

    def judge(self, request: Request) -> str:
        shown = parts(request)
        return json.dumps({"verdict": shown["references"] == f"1. {shown['prediction']}"})


def asked_of(talk: Dialogue, played: Any, count: int) -> Any:
    return session_questions([talk], played, WordEncoder(200), SessionConfig(count=count))  # type: ignore[arg-type]


def test_questions_on_a_session_need_the_conversation_and_are_answered_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    played = Played()
    questions, rejected, counts = asked_of(TALK, played, 2)
    assert [(one.text, one.category, one.evidence, one.time) for one in questions] == [
        ("What do I own?", "single", ("s1:1",), "2024-03-01"),
        ("Whose is it?", "single", ("s1:1",), "2024-03-01"),
        ("What do I own?", "multi", ("s1:1", "s2:1"), "2024-03-09"),
    ]
    # rewritten twice, then dropped
    assert [row["sample"] for row in rejected] == ["d s1", "d s2", "d s2", "d s2"]
    assert {row["why"] for row in rejected} == {"it is answered right without the conversation"}
    assert counts == {"sessions": 2, "lost": 0, "requests": 5, "questions": 3, "rejected": 4}
    first, second = played.chats["questions"].asked[:2]
    assert "entries" not in parts(first)
    assert parts(second)["entries"] == "1. Ann hikes"
    assert (types(2), types(5)) == ({"single": 1, "multi": 1, "temporal": 0}, {"single": 3, "multi": 1, "temporal": 1})
    # every request to the expert and the answerer moves a bar
    told = capsys.readouterr().err
    assert all(bar in told for bar in ("memory: 100% 8/8", "answers: 100% 8/8"))
    # the rest is judged without what cannot be used, which is written anew
    for row, why in (
        (OWNED | {"type": "multi"}, "type multi without entries"),
        (OWNED | {"turns": [9]}, "there is no turn 9"),
        (OWNED | {"type": "essay"}, "'essay' is not one of"),
    ):
        good = {name: value for name, value in OWNED.items() if name != "entries"} | {"type": "Single", "turns": "1"}
        first = Dialogue("d", TALK.sessions[:1])
        questions, rejected, counts = asked_of(first, Played([row, good]), 2)
        assert ([one.text for one in questions], counts["requests"]) == (["What do I own?"], 3)
        assert why in rejected[0]["why"]
