"""What LoCoMo's file holds beside its dialogues, written by an LLM: facts and summaries of sessions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remind.data.readers.builder import Place, objects
from remind.data.readers.locomo import EvidenceIndex, sessions

_ABOUT = re.compile(r"session_(\d+)_(?:observation|summary)", re.ASCII)


@dataclass(frozen=True)
class Annotations:
    """Of one dialogue.

    Attributes:
        facts: by session, each with the ids of the turns it is from.
        summaries: by session.
        turns: ids by session.
    """

    facts: dict[str, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_annotations(path: str | Path) -> dict[str, Annotations]:
    """The `observation` and `session_summary` fields by dialogue.

    Raises:
        DataError: a file that cannot be read, or a field that is not as in LoCoMo.
    """
    held: dict[str, Annotations] = {}
    for _, place, sample in objects([Path(path)], "a sample"):
        name = place.name(sample.get("sample_id"), "sample_id")
        here, one = Place(place.path, name), held.setdefault(name, Annotations())
        for session, _, turns in sessions(here, here.mapping(sample.get("conversation"), "conversation")):
            one.turns[session] = tuple(turn for _, turn, _ in turns)
        index = EvidenceIndex([turn for turns in one.turns.values() for turn in turns])
        for session, text in _by_session(here, sample, "session_summary"):
            one.summaries[session] = here.text(text, "session_summary")
        for session, speakers in _by_session(here, sample, "observation"):
            rows = [
                row for told in here.mapping(speakers, "observation").values() for row in here.sequence(told, "facts")
            ]
            for row in rows:
                match here.sequence(row, "a fact"):
                    case [text, turns]:
                        fact = (here.text(text, "a fact"), index.resolve(here, turns).turn_ids)
                        one.facts.setdefault(session, []).append(fact)
                    case parts:
                        raise here.error(f"a fact should be its text and its turns, not {len(parts)} values")
    return held


def _by_session(place: Place, sample: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Session ids and values of a field whose keys are such as `session_3_summary`."""
    entries = place.mapping(sample.get(name, {}), name).items()
    return [(f"S{int(match[1])}", value) for key, value in entries if (match := _ABOUT.fullmatch(key))]
