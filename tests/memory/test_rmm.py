"""RMM's topics, played by a script: who is asked what, where memories come from, how they merge, what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from remembering import locomo_dialogue
from scripted import ScriptedChat, held, parts, services, session
from words import WordEncoder

from remind.data.dialogue import Session, Turn
from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.rmm import RmmBank, RmmSystem, read_actions

FIRST = session("s1", "2023-05-08", "Ann: I run at dawn.", "Bob: I stay in bed.", "Ann: My cat Tom sleeps too.")
LATER = session("s2", "2023-06-01", "Ann: A race is in May.", "Bob: Good luck!", "Ann: [Tom] ran, away (again).")
#: Of whom, and a part of the session: what is extracted. The turns of an exchange are referred to together.
TOPICS = {
    ("Ann", "dawn"): [("Ann runs at dawn.", [0]), ("Ann has a cat, Tom.", ["1"])],
    ("Bob", "dawn"): [("Bob stays in bed.", ["[0]"])],
    ("Ann", "race"): [("Ann runs a race in May.", [0]), ("Tom ran away.", [1])],
}
#: What goes into which entry, and what comes of it.
MERGES = {
    "Ann runs a race in May.": ("Ann runs at dawn.", "Ann runs at dawn, for a race in May."),
    "Tom ran away.": ("Ann has a cat, Tom.", "Ann had a cat, [Tom], who ran away (again), in June."),
}


def scribe(request: Request) -> str:
    shown = parts(request)
    if request.stage == "update":
        history = json.loads(shown["history"])["history_summaries"]
        old, text = MERGES.get(json.loads(shown["new"])["new_summary"], (None, ""))
        return f"Merge({history.index(old)}, {text})" if old else "Add()"
    for (speaker, word), found in TOPICS.items():
        if speaker == shown["speaker"] and word in shown["conversation"]:
            return json.dumps({"extracted_memories": [{"summary": text, "reference": refs} for text, refs in found]})
    return "NO_TRAIT"


def bank(folder: Path, chat: ScriptedChat | None, dialogue: str = "d", **options: Any) -> RmmBank:
    return RmmSystem(**options).open(folder, dialogue, services(WordEncoder(), chat))  # type: ignore[arg-type]


def summaries(memory: RmmBank) -> dict[str, tuple[str, ...] | None]:
    return {text.splitlines()[0]: sources for text, sources in held(memory).items()}


def test_topics_of_both_speakers_are_extracted_and_merged(tmp_path: Path) -> None:
    chat = ScriptedChat(scribe)
    with bank(tmp_path / "b", chat) as memory:
        memory.ingest(FIRST)
        assert held(memory) == {
            "Ann runs at dawn.\nAnn: I run at dawn.\nBob: I stay in bed.": ("s1:1", "s1:2"),
            "Ann has a cat, Tom.\nAnn: My cat Tom sleeps too.": ("s1:3",),
            "Bob stays in bed.\nAnn: I run at dawn.\nBob: I stay in bed.": ("s1:1", "s1:2"),
        }
        # nobody is asked about the first memory of a speaker: there is nothing to merge it with
        assert chat.stages() == ["extract", "extract", "update"]
        assert "Turn 1:\nAnn: My cat Tom sleeps too." in parts(chat.asked[0])["conversation"]
        memory.ingest(LATER)
        assert memory.lost == []
        ran, cat = "Ann runs at dawn, for a race in May.", "Ann had a cat, [Tom], who ran away (again), in June."
        found = summaries(memory)
        assert found.keys() == {ran, cat, "Bob stays in bed."}
        assert found[ran] == ("s1:1", "s1:2", "s2:1", "s2:2")
        assert memory.retrieve(Query(ran), k=1).memories[0].text.splitlines()[0] == ran
        first = memory.store.journal()[0]
        assert (first["before"]["summary"], first["new"]["turns"]) == ("Ann runs at dawn.", ["s2:1", "s2:2"])


@pytest.mark.parametrize("source", ["extractive", "replay"])
def test_topics_without_a_model(source: str, tmp_path: Path) -> None:
    sample = locomo_dialogue("d", [["I run at dawn."] * 4], [])
    facts = {"session_1_observation": {"Ann": [["Ann runs.", "D1:1"]], "Bob": [["Bob runs.", ["D1:2", "D1:4"]]]}}
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{**sample, "observation": facts}]))
    turns = tuple(Turn(f"D1:{n}", "Ann" if n % 2 else "Bob", "I run at dawn.") for n in range(1, 5))
    with bank(tmp_path / "b", None, source=source, annotations=str(path)) as memory:
        memory.ingest(Session("S1", None, turns))
        wanted = {"replay": {"Ann runs.": ("D1:1",), "Bob runs.": ("D1:2", "D1:4")}}.get(
            source, {"Ann: I run at dawn.": ("D1:1", "D1:3"), "Bob: I run at dawn.": ("D1:2", "D1:4")}
        )
        assert summaries(memory) == wanted


def test_actions() -> None:
    assert read_actions("- `Merge(1, a, [b] (c), d.)`", 2) == [(1, "a, [b] (c), d.")]
    assert read_actions("Merge(0, a)\nAdd()", 2) == [(0, "a"), None]
    assert read_actions("Merge(2, a)", 2) == read_actions("", 2) == []
