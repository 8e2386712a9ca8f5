"""LightMem, played by a script: buffers, facts and their turns, updates at the end, and the number of calls."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripted import ScriptedChat, dump, held, opened, parts, session

from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.lightmem import LightMemSystem

FIRST = session(
    "s1", "2023-05-08", "Ann: I have a cat.", "Bob: Hm.", "Ann: The cat is called Tom.", "Bob: I live in Rome."
)
LATER = session("s2", "2023-06-01", "Bob: I moved to Oslo.", "Ann: Hm.")
_REMARK = re.compile(r"^(\d+)\. (?:\[(.*?)\] )?(\w+): (.*)$", re.MULTILINE)


def scribe(request: Request) -> str:
    """Takes down every remark but "Hm.", and lets all entries be."""
    if request.stage == "update":
        return '{"action": "ignore", "new_memory": ""}'
    told = [(int(number), f"{who}: {said}") for number, _, who, said in remarks(request) if said != "Hm."]
    return json.dumps({"data": [{"source_id": number, "fact": fact} for number, fact in told]})


def remarks(request: Request) -> list[tuple[str, ...]]:
    return _REMARK.findall(parts(request)["remarks"])


def test_facts_have_the_turns_that_tell_them(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with opened(LightMemSystem(), tmp_path / "b", chat, FIRST, LATER) as memory:
        assert not chat.asked, "what is said fits the buffers"
        memory.finish()
        assert held(memory) == {
            "Ann: I have a cat.": ("s1:1",),
            "Ann: The cat is called Tom.": ("s1:3",),
            "Bob: I live in Rome.": ("s1:4",),
            "Bob: I moved to Oslo.": ("s2:1",),
        }
        assert chat.stages().count("extract") == 1
        assert [remark[:2] for remark in remarks(chat.asked[0])][3:5] == [("3", "2023-05-08"), ("4", "2023-06-01")]
        (found,) = memory.retrieve(Query("What is the name of the cat?"), k=1).memories
        assert (found.text, found.time) == ("Ann: The cat is called Tom.", "2023-05-08")
        asked, before = len(chat.asked), dump(memory)
        memory.finish()
        assert (len(chat.asked), dump(memory)) == (asked, before)


TALES = session("s1", None, "Ann: I live in Rome.", "Ann: I live in Rome, in Via Appia.", "Ann: I live in Oslo.")


def editor(request: Request) -> str:
    """Brings the first entry up to date by the second, removes the second for the third."""
    if request.stage == "extract":
        return scribe(request)
    entry = parts(request)["entry"]
    if "Appia" in entry:
        return '{"action": "delete", "new_memory": ""}'
    return json.dumps({"action": "update", "new_memory": "Ann: My house stands in Via Appia."})


def test_entries_are_brought_up_to_date_by_later_ones(tmp_path: Path) -> None:
    chat = ScriptedChat(editor)
    with opened(LightMemSystem(update_at=0.3), tmp_path / "b", chat, TALES) as memory:
        memory.finish()
        shown = [parts(request) for request in chat.asked if request.stage == "update"]
        assert [(one["entry"], {*one["later"].splitlines()}) for one in shown] == [
            ("Ann: I live in Rome.", {"Ann: I live in Rome, in Via Appia.", "Ann: I live in Oslo."}),
            ("Ann: I live in Rome, in Via Appia.", {"Ann: I live in Oslo."}),
        ], "each is shown with later ones alone, as they were before; the last one has none"
        assert held(memory) == {
            "Ann: My house stands in Via Appia.": ("s1:1", "s1:2", "s1:3"),
            "Ann: I live in Oslo.": ("s1:3",),
        }
