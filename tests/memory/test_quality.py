"""SaliMory's measures of memory on a toy bank, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import ScriptedChat, opened, parts, session
from words import WordEncoder

from remind.data.dialogue import Question
from remind.llm.request import Request
from remind.memory.plain import PlainSystem
from remind.memory.quality import bank_quality

TALK = session("s1", "2024-03-01", "Ann: I own a red kayak.", "Bob: I like food.", "Ann: A cat sleeps here.")


def judge(request: Request) -> str:
    given = parts(request)
    if "profile" in given:
        # all, half or nothing of what is right
        wanted = given["right"].removeprefix("1. ").split()
        return json.dumps({"score": sum(word in given["profile"] for word in wanted) / len(wanted)})
    entries = [line.partition(". ")[2] for line in given["memory"].splitlines()]
    # each entry is a turn of its own, which the judge sees
    return json.dumps(
        {"entries": [{"factual": one in given["conversation"], "vague": "food" in one} for one in entries]}
    )


def test_a_bank_of_any_system_is_counted(tmp_path: Path) -> None:
    """Of the second answer one word of two is in the profile."""
    asked = zip("ab", ("What does Ann own?", "And Bob, what?"), ("red kayak", "food daily"), strict=True)
    questions = [Question(name, "d", text, answers=(answer,)) for name, text, answer in asked]
    chat = ScriptedChat(judge)
    with opened(PlainSystem("plain"), tmp_path / "b", None, TALK, encoder=WordEncoder()) as bank:
        found = bank_quality(bank, questions, chat, k=3)  # type: ignore[arg-type]
    assert found == {"vague": pytest.approx(1 / 3), "factual": 1, "utilisation": 0.75, "entries": 3, "questions": 2}
    assert len(chat.asked) == 3
