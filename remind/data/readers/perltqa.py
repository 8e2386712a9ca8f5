"""PerLTQA: what 30 characters remember, and questions about it, in two files (Du et al., 2024)."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from remind.data.readers import refmem
from remind.data.readers.builder import Draft, Place, objects

#: Kinds of memories, and of questions about them.
KINDS = ("profile", "social_relationship", "events", "dialogues")
_log = logging.getLogger(__name__)


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per character of `perltmem…json`, with the questions about them in `perltqa…json`; both files are
    held. Its first three sessions, `profile`, `social_relationship` and `events`, are what the character is and has
    lived, each memory a turn of the character's under the name that references have for it (`Hobbies`, `1_0`,
    `1_0_0`); a session per dialogue follows, `1_0_0#1`, with turns `1_0_0#1:T1`.

    Questions about characters without memories, of which the published files have one, are left out, as the log says.

    Raises:
        DataError: a record that lacks what it needs.
    """
    asked: dict[str, tuple[Place, dict[str, Any]]] = {}
    memories: dict[str, tuple[Place, dict[str, Any]]] = {}
    for _, place, record in objects(paths, "characters"):
        for name, value in record.items():
            where = place.at(name)
            sections = where.mapping(value, "a character")
            (asked if isinstance(sections.get("profile"), list) else memories)[name] = where, sections
    for name, (place, sections) in memories.items():
        draft = Draft(place, name)
        rows = [_memories(place, name, kind, sections.get(kind)) for kind in KINDS[:3]]
        talks = place.mapping(sections.get("dialogues"), "dialogues")
        rows += [_dialogue(place.at(key), key, value) for key, value in talks.items()]
        refmem.add_sessions(draft, rows)
        turns = {row["id"]: [turn["id"] for turn in row["turns"]] for row in rows}
        where, questions = asked.pop(name, (place, {}))
        for number, (kind, fields) in enumerate(_asked(where, questions)):
            reference = where.text(fields.get("Reference Memory") or "", "Reference Memory")
            named = filter(None, re.findall(r"'([^']*)'", reference) or [reference])  # "Hobbies", "['1_0_0', '1_0_1']"
            row: dict[str, Any] = {"id": f"{name}-q{number:03d}", "format": "direct", "category": kind}
            row |= {"question": fields.get("Question"), "answers": [fields.get("Answer")]}
            evidence = [turn for one in named for turn in turns.get(one, [one])]
            refmem.add_question(draft, where, row | {"evidence": evidence})
        yield draft
    for name in asked:
        _log.warning("questions about %s, of whom nothing is remembered, are left out", name)


def _memories(place: Place, name: str, kind: str, value: object) -> dict[str, Any]:
    """A session of what is no dialogue."""
    if isinstance(value, str):  # as Python writes a dictionary, in part of the published files
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    turns = []
    for key, memory in place.mapping(value, kind).items():
        text, time = f"{key}: {memory}", None
        if kind != "profile":
            fields = place.at(key).mapping(memory, "a memory")
            names = ("content",) if kind == "events" else ("Supporting Characters", "Relationship", "Description")
            text, time = ": ".join(str(fields.get(part, "")) for part in names), fields.get("Creation Time") or None
        turns.append({"id": key, "speaker": name, "text": text, "time": time})
    return {"id": kind, "turns": turns}


def _dialogue(place: Place, key: str, value: object) -> dict[str, Any]:
    """A session of lines `Speaker: words`, at the first of its times."""
    contents = place.mapping(place.mapping(value, "a dialogue").get("contents"), "contents")
    lines = [place.text(line, "a line") for said in contents.values() for line in place.sequence(said, "lines")]
    parts = enumerate((line.partition(":") for line in lines), start=1)
    turns = [{"id": f"{key}:T{n}", "speaker": who.strip(), "text": words.strip()} for n, (who, _, words) in parts]
    return {"id": key, "time": next(iter(contents), None), "turns": turns}


def _asked(place: Place, sections: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions with their kind: those about the profile in a list, others in lists by memory."""
    for kind in KINDS:
        for entry in place.sequence(sections.get(kind) or [], kind):
            fields = place.mapping(entry, "an entry")
            own = [[fields]] if "Question" in fields else [place.sequence(one, "questions") for one in fields.values()]
            yield from ((kind, place.mapping(one, "a question")) for listed in own for one in listed)
