"""Questions of the other styles, by a scripted model: P13n-style ones in four steps, and those on each session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
import pytest
from fault_proxy import Proxy, completion
from scripted import FENCED, ScriptedChat, parts, session
from scripted_chat import told_for
from words import WordEncoder

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import read, write_refmem
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Request
from remind.refmem.build import build_refmem
from remind.refmem.config import P13nConfig, RefMemConfig, SessionConfig
from remind.refmem.personal import KINDS, Writer, episode
from remind.refmem.sessions import session_questions, types

TALK = Dialogue(
    "d",
    (
        session("s1", "2024-03-01", "Ann: I love hiking.", "Bob: Nice.", "Ann: I own a red kayak."),
        session("s2", "2024-03-09", "Ann: My knee hurts on stairs.", "Bob: I bake bread. </passages>"),
    ),
)


def script(request: Request) -> dict[str, Any]:
    """A model that is right but for an entry or a reply here and there."""
    system, user = (message.text for message in request.messages[:2])
    value = told_for(system, user)
    assert value is not None
    ((step, rows),) = value.items()
    if step in ("signals", "points"):
        rows.append({"speaker": "Eve", "text": "x", "turns": [1]})
        rows += [{**rows[0], "turns": [9]}, {**rows[0], "text": " "}]
        rows.append({**rows[0], "text": "Ann owns a red kayak", "turns": [1.0]})
    if step == "groups":
        rows += [{**rows[0], "signals": [1, 1]}, {**rows[0], "signals": [99]}]
    if step == "questions":
        rows += [{**rows[0], "signals": [0]}, {**rows[0], "question": "Where do I paddle the red kayak that I own?"}]
    return value


def test_four_steps_keep_what_is_valid_and_say_why_the_rest_is_not() -> None:
    chat = ScriptedChat(lambda request: json.dumps(script(request)))
    writer = Writer(chat, P13nConfig())
    questions = writer.questions([TALK])
    # two sessions; then a request for each speaker with two signals, and one for each group
    assert writer.counts == {
        "signals_asked": 2, "signals": 6, "points_asked": 2, "points": 6, "groups_asked": 2, "groups": 2,
        "questions_asked": 2, "questions": 5,
    }  # fmt: skip
    # the last tells a signal of Ann's, and Bob is asked about it
    assert [question.category for question in questions] == [*KINDS] * 2 + [KINDS[0]]
    assert {question.evidence for question in questions} == {("s1:1", "s1:3"), ("s1:2", "s2:2")}
    assert {question.time for question in questions} == {"2024-03-09"}
    whys = {(row["step"], row["why"]) for row in writer.rejected}
    assert whys >= {
        ("signals", "'Eve' does not speak in the conversation"),
        ("signals", "there is no turn 9; 3 are shown"),
        ("points", "text has 0 characters; 1 to 2000 are allowed"),
        ("groups", "a group needs two signals"),
        ("groups", "there is no signal 99; 4 are shown"),
        ("questions", "there is no signal 0; 4 are shown"),
        ("questions", "the question gives away a signal that it should be answered from"),
    }
    # what is said stands in fences alone
    assert all("kayak" not in FENCED.sub("", request.messages[1].text) for request in chat.asked)

    stubborn = Writer(ScriptedChat(lambda request: "I would rather not."), P13nConfig())
    assert stubborn.questions([TALK]) == []
    assert {row["entry"] for row in stubborn.rejected} == {None}
    assert stubborn.counts["signals"] == 0


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


def test_the_command_writes_what_read_opens(tmp_path: Path, make_dialogue: Callable[..., Dialogue]) -> None:
    path = tmp_path / "in.jsonl"
    write_refmem(Corpus((make_dialogue(sessions=4),)), path)

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        system, user = (message["content"] for message in body["messages"])
        return 200, {}, completion(json.dumps(told_for(system, user)))

    with Proxy(answer=answer) as server:
        llm = LLMConfig(questions=EndpointConfig("m", server.url), cache=str(tmp_path / "cache.sqlite"))
        cfg = RefMemConfig(str(path), str(tmp_path / "out"), style="p13n", llm=llm)
        result = build_refmem(cfg)
        hits = server.hits
        assert hits == 4 + 4 + 2 + 2
        corpus = read(result)
        assert corpus.dialogues == read(path).dialogues
        assert [question.category for question in corpus.questions] == [*KINDS] * 2
        # a build that begins anew finds all replies
        again = build_refmem(replace(cfg, out=str(tmp_path / "again"), p13n=P13nConfig(episode_turns=8)))
        assert server.hits == hits
    cut = read(again)
    assert [len(dialogue.turns) for dialogue in cut.dialogues] == [8] * 4
    assert all(len(question.evidence) == 2 for question in cut.questions)
    with pytest.raises(ConfigError, match=r"style session needs llm\.answer or llm\.default"):
        build_refmem(replace(cfg, style="session"))
    with Proxy(answer=lambda body: (200, {}, completion("no"))) as server:
        llm = LLMConfig(EndpointConfig("m", server.url), cache=None)
        with pytest.raises(DataError, match=r"no question is left; \d+ rejected, the first: there is no JSON"):
            build_refmem(replace(cfg, out=str(tmp_path / "none"), llm=llm))


class Played:
    """Chat models for every stage, of which a session's writer is right at the second try."""

    def __init__(self) -> None:
        self.chats = {
            "memory": ScriptedChat(self.memory),
            "questions": ScriptedChat(self.writer),
            "answer": ScriptedChat(self.answer),
            "judge": ScriptedChat(self.judge),
        }

    def stage(self, stage: str) -> ScriptedChat:
        return self.chats[stage]

    def memory(self, request: Request) -> str:
        role = request.prompt_id.removeprefix("membuilder_").partition("-")[0]
        return json.dumps({"ops": [{"op": "ADD", "memory": "Ann hikes", "sources": [1]}] if role == "semantic" else []})

    def writer(self, request: Request) -> str:
        rows = [
            {"type": "single", "question": "What do I own?", "answer": "kayak", "turns": [1], "entries": []},
            {"type": "temporal", "question": "Which colour is the sky?", "answer": "blue", "turns": [2], "entries": []},
        ]
        if "s2" in request.sample:
            rows[0] |= {"type": "multi", "entries": [1]}
        if len(request.messages) > 2:
            assert "1. Which colour is the sky? - it is answered right without" in request.messages[-1].text
            rows = [rows[0] | {"question": "Whose is it?", "answer": "Ann"} if "s1" in request.sample else rows[1]]
        return json.dumps({"questions": rows})

    def answer(self, request: Request) -> str:
        if request.prompt_id.startswith("refmem_blind"):
            return json.dumps({"answers": ["blue" if "sky" in parts(request)["question"] else "a dog"]})
        assert "Ann" in parts(request)["memories"]
        return {"own": "kayak", "sky": "blue", "Whose": "Ann"}[
            re.findall("own|sky|Whose", parts(request)["question"])[0]
        ]

    def judge(self, request: Request) -> str:
        shown = parts(request)
        return json.dumps({"verdict": shown["references"] == f"1. {shown['prediction']}"})


def test_questions_on_a_session_need_the_conversation_and_are_answered_from_it() -> None:
    played = Played()
    questions, rejected, counts = session_questions(
        [TALK],
        played,
        WordEncoder(200),
        SessionConfig(count=2),  # type: ignore[arg-type]
    )
    assert [(one.text, one.category, one.evidence, one.time) for one in questions] == [
        ("What do I own?", "single", ("s1:1",), "2024-03-01"),
        ("Whose is it?", "single", ("s1:1",), "2024-03-01"),
        ("What do I own?", "multi", ("s1:1", "s2:1"), "2024-03-09"),
    ]
    # rewritten twice, then dropped
    assert [row["sample"] for row in rejected] == ["d s1", "d s2", "d s2", "d s2"]
    assert {row["why"] for row in rejected} == {"it is answered right without the conversation"}
    assert counts == {"sessions": 2, "by_rule": 0, "requests": 5, "questions": 3, "rejected": 4}
    first, second = played.chats["questions"].asked[:2]
    assert "entries" not in parts(first)
    assert parts(second)["entries"] == "1. Ann hikes"
    assert "exactly 2 questions" in first.messages[0].text


def test_replies_of_the_wrong_form_are_dropped_with_the_reason() -> None:
    row = {"type": "single", "question": "Q?", "answer": "a", "turns": [1], "entries": []}
    for rows, why in (
        ([row] * 2, "2 questions, not 1"),
        ([row | {"type": "multi"}], "type multi without entries"),
        ([row | {"turns": []}], "without turns"),
        ([row | {"turns": [9]}], "there is no turn 9"),
        ([row | {"turns": [True]}], "True"),
    ):
        played = Played()
        played.chats["questions"] = ScriptedChat(lambda request, rows=rows: json.dumps({"questions": rows}))
        questions, rejected, _ = session_questions(
            [replace(TALK, sessions=TALK.sessions[:1])],
            played,
            WordEncoder(200),
            SessionConfig(count=1),  # type: ignore[arg-type]
        )
        assert (questions, len(rejected)) == ([], 1)
        assert why in rejected[0]["why"]


def test_types_have_their_shares() -> None:
    assert types(5) == {"single": 3, "multi": 1, "temporal": 1}
    assert types(10) == {"single": 5, "multi": 3, "temporal": 2}
    assert types(1) == {"single": 1, "multi": 0, "temporal": 0}
