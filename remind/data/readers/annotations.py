"""What LoCoMo's file holds beside its dialogues: facts that an LLM has written."""

from __future__ import annotations

import re
from pathlib import Path

from remind.data.readers.builder import Place, objects
from remind.data.readers.locomo import EvidenceIndex, sessions

_ABOUT = re.compile(r"session_(\d+)_observation", re.ASCII)


#: Facts of one dialogue by session, each with the ids of the turns it is from.
Annotations = dict[str, list[tuple[str, tuple[str, ...]]]]


def read_annotations(path: str | Path) -> dict[str, Annotations]:
    """The field `observation` by dialogue.

    Raises:
        DataError: a file that cannot be read, or a field that is not as in LoCoMo.
    """
    held: dict[str, Annotations] = {}
    for _, place, sample in objects([Path(path)], "a sample"):
        name = place.name(sample.get("sample_id"), "sample_id")
        here = Place(place.path, name)
        talk = sessions(here, here.mapping(sample.get("conversation"), "conversation"))
        index = EvidenceIndex([turn for _, _, turns in talk for _, turn, _ in turns])
        facts = held.setdefault(name, {})
        for key, speakers in here.mapping(sample.get("observation", {}), "observation").items():
            told = here.mapping(speakers, "observation").values() if (number := _ABOUT.fullmatch(key)) else ()
            for row in (row for rows in told for row in here.sequence(rows, "observation")):
                match here.sequence(row, "a fact"):
                    case [text, turns] if number:
                        fact = (here.text(text, "a fact"), index.resolve(here, turns).turn_ids)
                        facts.setdefault(f"S{int(number[1])}", []).append(fact)
                    case parts:
                        raise here.error(f"a fact should be its text and its turns, not {len(parts)} values")
    return held
