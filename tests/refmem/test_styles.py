"""Questions of the other styles, by a scripted model: P13n-style ones in four steps, and those on each session."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
from refmem_samples import talk
from scripted import FENCED, parts, session
from scripted_chat import Scripted, told_for
from words import WordEncoder

from remind.data.dialogue import Dialogue, Question
from remind.llm.request import Reply, Request
from remind.refmem.config import P13nConfig, SessionConfig
from remind.refmem.styles import KINDS, SCHEMAS, episode, personal_questions, session_questions, types

FIRST = session("s1", "2024-03-01", "Ann: I love hiking.", "Bob: Nice.", "Ann: I own a red kayak.")
SECOND = session("s2", "2024-03-09", "Ann: My knee hurts on stairs.", "Bob: I bake bread. </passages>")
TALK = Dialogue("d", (FIRST, SECOND))


def script(request: Request) -> dict[str, Any]:
    """A model that is right but for an entry here and there."""
    value = told_for(*(message.text for message in request.messages[:2]))
    assert value is not None
    ((step, rows),) = value.items()
    told = [{"turns": [9]}, {"text": " "}, {"speaker": "Eve"}, {"text": "Ann owns a red kayak", "turns": [1.0]}]
    changes: dict[str, list[dict[str, Any]]] = {"signals": told, "points": told, "groups": [{"signals": [1, 1]}]}
    changes["questions"] = [{"signals": [0]}, {"question": "Where do I paddle the red kayak that I own?"}]
    rows += [{**rows[0], **change} for change in changes[step]]
    return value


def test_four_steps_keep_what_is_valid_and_say_why_the_rest_is_not() -> None:
    chat = Scripted(script)
    questions, rejected, counts = personal_questions([TALK], SimpleNamespace(stage=lambda _: chat), P13nConfig())  # type: ignore[arg-type]
    # two sessions; then a request for each speaker with two signals, and one for each group
    assert {name: counts[name] for name in SCHEMAS} == {"signals": 6, "points": 6, "groups": 2, "questions": 5}
    assert [counts[f"{name}_asked"] for name in SCHEMAS] == [2] * 4
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
    assert all("kayak" not in FENCED.sub("", request.messages[1].text) for request in chat.requests)
    stubborn = Scripted(lambda request: "I would rather not.")
    questions, rejected, counts = personal_questions([TALK], SimpleNamespace(stage=lambda _: stubborn), P13nConfig())  # type: ignore[arg-type]
    assert (questions, counts["signals"], {row["entry"] for row in rejected}) == ([], 0, {None})


def test_an_episode_is_cut_round_the_evidence() -> None:
    question = Question("q", "talk", "?", answers=("x",), evidence=("D1:4", "D3:9"))
    cut, asked = episode(talk(), question, 6)
    assert [turn.id for turn in cut.turns] == ["D1:3", "D1:4", "D1:5", "D3:8", "D3:9", "D3:10"]
    assert ([one.index for one in cut.images], [one.id for one in cut.sessions]) == ([0, 1], ["S1", "S3"])
    assert (asked.dialogue_id, asked.evidence) == (cut.id, question.evidence)


OWNED = {"type": "single", "question": "What do I own?", "answer": "kayak", "turns": [1], "entries": []}
SKY = {"type": "temporal", "question": "Which colour is the sky?", "answer": "blue", "turns": [2], "entries": []}


class Played:
    """Chat models for every stage, of which a session's writer is right at the second try."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        write = self.questions if rows is None else lambda request: {"questions": rows}
        plays = {"memory": self.memory, "questions": write, "answer": self.answer, "judge": self.judge}
        self.chats = {stage: Scripted(play) for stage, play in plays.items()}
        self.stage = self.chats.__getitem__

    def memory(self, request: Request) -> dict[str, Any]:
        ops = [{"op": "ADD", "memory": "Ann hikes", "sources": [1]}]
        return {"ops": ops if request.prompt_id.startswith("membuilder_semantic") else []}

    def questions(self, request: Request) -> dict[str, Any]:
        rows = [OWNED | ({"type": "multi", "entries": [1]} if "s2" in request.sample else {}), SKY]
        if len(request.messages) > 2:
            assert "1. Which colour is the sky? - it is answered right without" in request.messages[-1].text
            rows = [OWNED | {"question": "Whose is it?", "answer": "Ann"} if "s1" in request.sample else SKY]
        return {"questions": rows}

    def answer(self, request: Request) -> Any:
        if request.prompt_id.startswith("refmem_blind"):
            return {"answers": ["blue" if "sky" in parts(request)["question"] else "a dog"]}
        assert "Ann" in parts(request)["memories"]
        about = re.findall("own|sky|Whose", parts(request)["question"])[0]
        return {"own": "kayak", "sky": "blue", "Whose": "Ann"}[about]

    def judge(self, request: Request) -> dict[str, Any]:
        shown = parts(request)
        return {"verdict": shown["references"] == f"1. {shown['prediction']}"}


def asked_of(given: Dialogue, played: Any) -> Any:
    return session_questions([given], played, WordEncoder(200), SessionConfig(count=2))  # type: ignore[arg-type]


def test_questions_on_a_session_need_the_conversation_and_are_answered_from_it() -> None:
    played = Played()
    questions, rejected, counts = asked_of(TALK, played)
    assert [(one.text, one.category, one.evidence, one.time) for one in questions] == [
        ("What do I own?", "single", ("s1:1",), "2024-03-01"),
        ("Whose is it?", "single", ("s1:1",), "2024-03-01"),
        ("What do I own?", "multi", ("s1:1", "s2:1"), "2024-03-09"),
    ]
    # rewritten twice, then dropped
    assert [row["sample"] for row in rejected] == ["d s1", "d s2", "d s2", "d s2"]
    assert {row["why"] for row in rejected} == {"it is answered right without the conversation"}
    assert counts == {"sessions": 2, "lost": 0, "requests": 5, "questions": 3, "rejected": 4}
    first, second = played.chats["questions"].requests[:2]
    assert "entries" not in parts(first)
    assert parts(second)["entries"] == "1. Ann hikes"
    assert (types(2), types(5)) == ({"single": 1, "multi": 1, "temporal": 0}, {"single": 3, "multi": 1, "temporal": 1})
    # a guess that is lost proves nothing, and one in another form is a guess
    for guess, why in (
        (Reply("blue or a dog", failure="invalid"), None),
        (Reply("kayak", failure="invalid"), "it is answered right without the conversation"),
        (Reply("", failure="server", message="down"), "it could not be checked: down"),
        (Reply("<think>hm", failure="invalid", message="a thought alone"), "it could not be checked: a thought alone"),
    ):
        played = Played([OWNED])
        given = played.chats["answer"].answer
        played.chats["answer"].answer = lambda r: guess if r.prompt_id.startswith("refmem_blind") else given(r)  # noqa: B023
        questions, rejected, _ = asked_of(Dialogue("d", (FIRST,)), played)
        assert (len(questions), {row["why"] for row in rejected}) == ((1, set()) if why is None else (0, {why}))
    # the rest is judged without what cannot be used, which is written anew
    changes = ({"type": "multi"}, {"turns": [9]}, {"type": "essay"}, {"type": "Single", "turns": "1"})
    questions, rejected, counts = asked_of(Dialogue("d", (FIRST,)), Played([OWNED | one for one in changes]))
    assert ([one.text for one in questions], counts["requests"]) == (["What do I own?"], 3)
    why = ("type multi without entries", "there is no turn 9", "'essay' is not one of")
    assert all(text in row["why"] for text, row in zip(why, rejected[:3], strict=True))
