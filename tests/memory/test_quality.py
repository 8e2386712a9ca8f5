"""SaliMory's measures of memory on a toy bank, counted by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, opened, parts, session
from words import WordEncoder

from remind.data.dialogue import Question, Session
from remind.llm.request import Request
from remind.memory.bank import Bank
from remind.memory.base import Draft, Query, System
from remind.memory.plain import PlainSystem
from remind.memory.quality import bank_quality

TALK = session("s1", "2024-03-01", "Ann: I own a red kayak.", "Bob: I like food.", "Ann: A cat sleeps here.")
#: Two are true, one of them vague; one is made up.
NOTES = ("Ann owns a red kayak", "Bob likes something", "Cy owns a boat")


class Notes(System):
    """Notes whose turns nobody knows."""

    provenance = None


class NotesBank(Bank, of=Notes):
    def remember(self, session: Session) -> None:
        for text in NOTES:
            self.put(Draft("note", None, text))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        return self.store.rank(query.text, "dense")


def judge(request: Request) -> str:
    given = parts(request)
    if "profile" in given:
        # all, half or nothing of what is right
        wanted = given["right"].removeprefix("1. ").split()
        return json.dumps({"score": sum(word in given["profile"] for word in wanted) / len(wanted)})
    entries = [line.partition(". ")[2] for line in given["memory"].splitlines()]
    names = given["conversation"]
    return json.dumps(
        {"entries": [{"factual": one.split()[0].strip(":") in names, "vague": "something" in one} for one in entries]}
    )


def asked(name: str, text: str, *answers: str) -> Question:
    return Question(name, "d", text, answers=answers)


QUESTIONS = [asked("a", "What does Ann own?", "red kayak"), asked("b", "And Bob, what?", "something else")]


@pytest.mark.parametrize(("system", "expected"), [(Notes("notes"), (1 / 3, 2 / 3)), (PlainSystem("plain"), (0, 1))])
def test_a_bank_of_any_system_is_counted(system: Any, expected: tuple[float, float], tmp_path: Path) -> None:
    chat = ScriptedChat(judge)
    with opened(system, tmp_path / "b", None, TALK, encoder=WordEncoder()) as bank:
        found = bank_quality(bank, QUESTIONS, chat, k=3)  # type: ignore[arg-type]
    assert (found["vague"], found["factual"]) == pytest.approx(expected)
    # both words of the first answer; one of the second's two where a note has it
    assert found["utilisation"] == pytest.approx((1 + 0.5 * (system.name == "notes")) / 2)
    assert (found["entries"], found["questions"], len(chat.asked)) == (3, 2, 3)
    # replies of no use count for nothing
    with opened(system, tmp_path / "b", None, encoder=WordEncoder()) as bank:
        found = bank_quality(bank, QUESTIONS, ScriptedChat(lambda _: '{"entries": []}'))  # type: ignore[arg-type]
    assert found == {"vague": None, "factual": None, "utilisation": None, "entries": 0, "questions": 0}
