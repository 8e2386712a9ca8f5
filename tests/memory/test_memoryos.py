"""MemoryOS, played by a script: pages, segments, heat, what is learned from them, and the number of calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from scripted import ScriptedChat, opened, parts, session

from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.memoryos import MemoryOSBank, MemoryOSSystem

FIRST = session(
    "s1",
    "2023-05-08",
    *("Ann: My cat is called Tom.", "Bob: A fine name for a cat."),
    *("Ann: The cat sleeps all day.", "Bob: Cats do."),
    *("Ann: I moved to Rome.", "Bob: Is it warm in Rome?"),
)
LATER = session("s2", "2023-06-01", "Ann: The cat ran away.", "Bob: Oh no.", "Ann: Hm.", "Bob: Hm.")
QUESTION = Query("Which name does the cat of Ann have?", "q")


def asks(request: Request) -> str:
    """Name of the template a request was made from, without the system's."""
    return request.prompt_id.rpartition("-")[0].removeprefix("memoryos_")


def subject(text: str) -> str:
    return "Cats." if "cat" in text.lower() else "Rome, the town." if "Rome" in text else "Nothing."


def scribe(request: Request) -> str:
    """Files by what is spoken of, and takes down the names."""
    shown, kind = parts(request), asks(request)
    if kind == "continue":
        return json.dumps({"continues": subject(shown["earlier"]) == subject(shown["later"])})
    if kind == "overview":
        return f"{shown['before']} More." if "before" in shown else "<think>hm</think>On " + subject(shown["exchange"])
    if kind == "topic":
        summary = subject(shown["exchange"])
        return json.dumps({"summary": summary, "keywords": [summary.split()[0].strip(".,").lower()]})
    if kind == "profile":
        return "\n".join(filter(None, [shown.get("profile"), f"{shown['person']} has a cat."]))
    if kind == "knowledge":
        user = ["The cat of Ann is called Tom."] if "called Tom" in shown["exchanges"] else []
        return json.dumps({"user": user, "assistant": ["Bob knows cats."]})
    return '{"keywords": ["Cats", "name"]}'


def kept(bank: MemoryOSBank, kind: str) -> dict[str, tuple[str, ...] | None]:
    memories = map(bank.store.memory, bank.store.numbers())
    return {memory.text: memory.sources for memory in memories if memory.kind == kind}


def test_pages_leave_the_queue_for_segments(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(MemoryOSSystem(short=1), tmp_path / "b", chat, FIRST, LATER) as memory:
        assert kept(memory, "segment") == {
            "Cats.": ("s1:1", "s1:2", "s1:3", "s1:4", "s2:1", "s2:2"),
            "Rome, the town.": ("s1:5", "s1:6"),
        }
        assert list(kept(memory, "page").items()) == [
            ("Ann: My cat is called Tom.\nBob: A fine name for a cat.\nOverview: On Cats. More.", ("s1:1", "s1:2")),
            ("Ann: The cat sleeps all day.\nBob: Cats do.\nOverview: On Cats. More.", ("s1:3", "s1:4")),
            ("Ann: I moved to Rome.\nBob: Is it warm in Rome?\nOverview: On Rome, the town.", ("s1:5", "s1:6")),
            ("Ann: The cat ran away.\nBob: Oh no.\nOverview: On Cats.", ("s2:1", "s2:2")),
            ("Ann: Hm.\nBob: Hm.", ("s2:3", "s2:4")),
        ], "an overview holds for all pages that go on with each other"
        assert Counter(map(asks, chat.asked)) == {"overview": 4, "topic": 4, "continue": 3}


def test_hot_segments_are_learned_from(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(MemoryOSSystem(short=1, hot=3), tmp_path / "b", chat, FIRST, LATER) as memory:
        learned = [request for request in chat.asked if request.stage == "extract"]
        assert list(map(asks, learned)) == ["profile", "knowledge"]
        assert parts(learned[0])["person"] == "Ann"
        assert parts(learned[0])["exchanges"].count("\n\n") == 1, "two pages and recency make a heat of 3"
        told = ("s1:1", "s1:2", "s1:3", "s1:4")
        assert kept(memory, "profile") == {"Ann has a cat.": told}
        assert kept(memory, "knowledge") == {"The cat of Ann is called Tom.": told, "Bob knows cats.": told}
        # the third page on cats is one that is not learned from
        cats = memory.store.note(next(n for n in memory.store.numbers() if memory.store.memory(n).text == "Cats."))
        assert (len(cats["pages"]), len(cats["fresh"])) == (3, 1)
        assert memory.retrieve(QUESTION, k=99).memories[-1].kind == "profile"
