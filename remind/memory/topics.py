"""Prospective reflection (RMM, Section 5): what a session tells of its speakers, topic by topic, and how a new topic
changes the memory.

Summaries and decisions come from a chat model, from the facts that LoCoMo ships, or by rule from the dialogue's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from remind.data.dialogue import Dialogue, Session
from remind.llm.asking import Unusable
from remind.llm.structured import object_schema
from remind.memory.asking import TEXT, ask, failed, words
from remind.memory.base import Bank
from remind.memory.expansions import Annotations, gist
from remind.memory.plain import cut
from remind.models.encoder import SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.perception.index import segment
from remind.states.pyramid import one_line, turn_text

#: Tokens of a reply; the paper names none.
ROOM = {"extract": 2000, "update": 1000}
_REFERENCE = {"type": "array", "items": {"anyOf": [{"type": "integer"}, TEXT]}}
SCHEMA = object_schema(extracted_memories={"type": "array", "items": object_schema(summary=TEXT, reference=_REFERENCE)})
#: The text ends at the last bracket of the line, since it may hold commas and brackets of its own.
_MERGE = re.compile(r"\bMerge\s*\(\s*(\d+)\s*,\s*(.*\S)\s*\)", re.IGNORECASE)
_ADD = re.compile(r"\bAdd\s*\(\s*\)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?…])\s+")


@dataclass(frozen=True, slots=True)
class Topic:
    """One matter in the life of a speaker.

    Attributes:
        summary: on one line; what it is found by.
        speaker: whom it is about.
        turns: ids of the turns it was taken from.
    """

    summary: str
    speaker: str
    turns: tuple[str, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """From the fields as JSON."""
        return cls(value["summary"], value["speaker"], tuple(value["turns"]))


@dataclass(frozen=True, slots=True)
class Merge:
    """A new topic goes into the entry at `place` of those shown, which has `text` as its summary from now on."""

    place: int
    text: str


def asked(bank: Bank, session: Session) -> tuple[list[Topic], list[str]]:
    """The topics of each speaker by the chat model (Appendix D.1.1), and why key sentences stand for some, a line each.

    A turn of the paper is an exchange: what is said until the opener of the session speaks again.
    """
    exchanges = [[turn.id for turn in part] for part in cut(session, "round")]
    shown = "\n".join(
        "\n".join([f"Turn {number}:", *map(turn_text, part)]) for number, part in enumerate(cut(session, "round"))
    )
    topics: list[Topic] = []
    reasons: list[str] = []
    for speaker in dict.fromkeys(turn.speaker for turn in session.turns):
        try:
            if bank.chat("extract") is None:
                raise Unusable("extract: no endpoint is named")
            data = {"speaker": one_line(speaker), "conversation": shown}
            reply = ask(bank, "extract", "rmm_extract", data, ROOM["extract"], SCHEMA)
            if reply.failure is not None and not (reply.failure == "invalid" and "NO_TRAIT" in words(reply)):
                raise Unusable(failed("extract", reply))
            found = (reply.value or {}).get("extracted_memories", [])
        except Unusable as error:
            reasons.append(f"{error} ({one_line(speaker)})")
            topics += [topic for topic in by_segment(session, bank.encoder) if topic.speaker == speaker]
            continue
        for number, one in enumerate(found):
            numbers = [int(text) for item in one["reference"] for text in re.findall(r"-?\d+", str(item))]
            if outside := [place for place in numbers if not 0 <= place < len(exchanges)]:
                told = f"extract: memory {number} ({one_line(speaker)}) refers to turn {outside[0]} of {len(exchanges)}"
                reasons.append(told)
            there = sorted({*numbers} - {*outside})
            summary = one_line(one["summary"])
            if there and summary:
                topics.append(Topic(summary, speaker, tuple(name for place in there for name in exchanges[place])))
    return topics, reasons


def replayed(annotations: Annotations, session: Session) -> list[Topic]:
    """LoCoMo's facts of the session, each about the speaker of its first turn."""
    speakers = {turn.id: turn.speaker for turn in session.turns}
    facts = [(one_line(text), ids) for text, ids in annotations.facts.get(session.id, ())]
    return [Topic(text, speakers[ids[0]], ids) for text, ids in facts if text and ids and speakers.keys() >= {*ids}]


def by_segment(session: Session, encoder: SentenceEncoder) -> list[Topic]:
    """The key sentences of each speaker in each topical segment."""
    texts = [turn_text(turn) for turn in session.turns]
    # numbers of images count over the whole dialogue
    bare = replace(session, turns=tuple(replace(turn, images=()) for turn in session.turns))
    parts = segment(
        Dialogue(session.id, (bare,)), encoder.encode_apart(texts), SegmentConfig(), encoder.count_many(texts)
    )
    topics = []
    for part in parts:
        turns = session.turns[part.start : part.end + 1]
        for speaker in dict.fromkeys(turn.speaker for turn in turns):
            own = tuple(turn for turn in turns if turn.speaker == speaker)
            topics.append(Topic(gist(session, own), speaker, tuple(turn.id for turn in own)))
    return topics


def decided(bank: Bank, topic: Topic, entries: Sequence[str]) -> list[Merge | None]:
    """What becomes of the topic by the chat model (Appendix D.1.2); None: it is added.

    Args:
        entries: summaries of memories of the same speaker.

    Raises:
        Unusable: no reply, or none that says what to do.
    """
    if bank.chat("update") is None:
        raise Unusable("update: no endpoint is named")
    data = {
        "history": json.dumps({"history_summaries": list(entries)}, ensure_ascii=False, indent=0),
        "new": json.dumps({"new_summary": topic.summary}, ensure_ascii=False),
    }
    reply = ask(bank, "update", "rmm_update", data, ROOM["update"])
    if reply.failure is not None:
        raise Unusable(failed("update", reply))
    return read_actions(words(reply), len(entries))


def read_actions(text: str, count: int) -> list[Merge | None]:
    """The lines Add() and Merge(i, text) of a reply; of several Add() one.

    Raises:
        Unusable: there are none, or one names an entry that there is not.
    """
    actions: list[Merge | None] = []
    for line in text.splitlines():
        if match := _MERGE.search(line):
            place, merged = int(match[1]), one_line(match[2])
            if len(merged) > 2 and merged[0] == merged[-1] and merged[0] in "\"'":
                merged = merged[1:-1]
            if place >= count:
                raise Unusable(f"update: Merge names entry {place} of {count}")
            actions.append(Merge(place, merged))
        elif _ADD.search(line) and None not in actions:
            actions.append(None)
    if not actions:
        raise Unusable("update: the reply is neither Add() nor Merge(i, text)")
    return actions


def joined(new: str, old: str) -> str:
    """The sentences of a new summary, then those of an older one that are not among them."""
    return " ".join(dict.fromkeys(_SENTENCE.split(new) + _SENTENCE.split(old)))
