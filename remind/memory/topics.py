"""Prospective reflection (RMM, Section 5): what a session tells of its speakers, topic by topic, and how a new topic
changes the memory.

Summaries and decisions come from a chat model, from the facts that LoCoMo ships, or by rule from the dialogue's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remind.data.dialogue import Dialogue, Session
from remind.data.readers.locomo import Annotations
from remind.llm.request import from_template
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, words
from remind.memory.expansions import gist
from remind.memory.plain import cut
from remind.models.encoder import SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment
from remind.states.pyramid import one_line, turn_lines, unnumbered

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


def extracted(bank: Bank, session: Session) -> list[Topic]:
    """The topics of each speaker by the chat model (Appendix D.1.1).

    A turn of the paper is an exchange: what is said until the opener of the session speaks again.
    """
    parts = list(cut(session, "round"))
    lines = [line for number, part in enumerate(parts) for line in (f"Turn {number}:", *map(turn_lines, part))]
    topics: list[Topic] = []
    for speaker in dict.fromkeys(turn.speaker for turn in session.turns):
        data = {"speaker": one_line(speaker), "conversation": "\n".join(lines)}
        ask = from_template("extract", "rmm_extract", bank.dialogue_id, SCHEMA, ROOM["extract"], data)
        (reply,) = bank.send(ask, salvaged=True)
        if reply.failure == "invalid" and "NO_TRAIT" not in words(reply):
            bank.lost.append(f"extract: invalid: {reply.message}")
        for one in mapping(reply).get("extracted_memories", ()):
            numbers = {int(text) for item in one["reference"] for text in re.findall(r"-?\d+", str(item))}
            # references to what is not there are passed over
            turns = tuple(turn.id for place, part in enumerate(parts) if place in numbers for turn in part)
            if turns and (summary := one_line(one["summary"])):
                topics.append(Topic(summary, speaker, turns))
    return topics


def replayed(annotations: Annotations, session: Session) -> list[Topic]:
    """LoCoMo's facts of the session, each about the speaker of its first turn."""
    speakers = {turn.id: turn.speaker for turn in session.turns}
    facts = [(one_line(text), ids) for text, ids in annotations.get(session.id, ())]
    return [Topic(text, speakers[ids[0]], ids) for text, ids in facts if text and ids and speakers.keys() >= {*ids}]


def by_segment(session: Session, encoder: SentenceEncoder) -> list[Topic]:
    """The key sentences of each speaker in each topical segment."""
    texts = [unnumbered(turn_lines(turn)) for turn in session.turns]
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


def decided(bank: Bank, topic: Topic, entries: Sequence[str]) -> list[tuple[int, str] | None]:
    """What becomes of the topic by the chat model (Appendix D.1.2): an entry's place and the summary that it has from
    now on; None: it is added. Empty: it does not tell.

    Args:
        entries: summaries of memories of the same speaker.
    """
    data = {
        "history": json.dumps({"history_summaries": list(entries)}, ensure_ascii=False, indent=0),
        "new": json.dumps({"new_summary": topic.summary}, ensure_ascii=False),
    }
    reply = bank.ask("update", "rmm_update", data, ROOM["update"])
    actions = [] if reply.failure is not None else read_actions(words(reply), len(entries))
    if reply.failure is None and not actions:
        bank.lost.append("rmm_update: the reply is neither Add() nor Merge(i, text) of an entry")
    return actions


def read_actions(text: str, count: int) -> list[tuple[int, str] | None]:
    """The lines Add() and Merge(i, text) of a reply; of several Add() one. Empty: there are none, or one names an entry
    that there is not."""
    actions: list[tuple[int, str] | None] = []
    for line in text.splitlines():
        if match := _MERGE.search(line):
            place, merged = int(match[1]), one_line(match[2]).strip('"')
            if place >= count:
                return []
            actions.append((place, merged))
        elif _ADD.search(line) and None not in actions:
            actions.append(None)
    return actions


def joined(new: str, old: str) -> str:
    """The sentences of a new summary, then those of an older one that are not among them."""
    return " ".join(dict.fromkeys(_SENTENCE.split(new) + _SENTENCE.split(old)))
