"""What keys are expanded by: facts, from an LLM or from LoCoMo's files; and key sentences.

Each source takes stretches of a session, which are single turns or all that count of it, and gives some texts for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.data.dialogue import Session, Turn
from remind.data.readers.locomo import Annotations, read_annotations
from remind.llm.request import from_template
from remind.llm.structured import object_schema
from remind.memory.bank import mapping
from remind.memory.base import TEXTS, System, texts
from remind.states.pyramid import one_line, turn_lines, turn_text
from remind.text.words import key_sentences, rarity, sentences, stems, telling

if TYPE_CHECKING:
    from remind.memory.bank import Bank
from remind.memory.base import Services

Stretch = tuple[Turn, ...]

#: Room for a reply in tokens (LongMemEval, Appendix D).
ROOM = 2000


def gist(session: Session, turns: Stretch) -> str:
    """Key sentences of turns of one speaker, those with words that are rare in the session; the speaker is named once,
    and all on one line."""
    weights, parts = rarity([stems(turn_text(turn)) for turn in session.turns]), sentences(turns)
    name = f"{one_line(turns[0].speaker)}: "
    lines = key_sentences(parts, [telling(part.text, weights) for part in parts]).splitlines()
    said = " ".join(line.removeprefix(name) for line in lines) or one_line(turn_text(turns[0])).removeprefix(name)
    return name + said


def replay(held: Annotations, session: Session, stretches: Sequence[Stretch]) -> list[list[str]]:
    """LoCoMo's facts that are from a turn of the stretch, and from none that the session lacks."""
    there = {turn.id for turn in session.turns}
    facts = [(text, ids) for text, ids in held.get(session.id, ()) if there.issuperset(ids)]
    return [[text for text, ids in facts if not {t.id for t in one}.isdisjoint(ids)] for one in stretches]


@dataclass(frozen=True)
class Replaying(System):
    """Base of systems that can take what LoCoMo's file holds in place of what an LLM would write.

    Attributes:
        source: "replay" where they do.
        annotations: LoCoMo's file.
    """

    source: str = "llm"
    annotations: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "replay" and self.annotations is None:
            raise ConfigError("source replay needs LoCoMo's file as annotations")

    @cached_property
    def replayed(self) -> Mapping[str, Annotations]:
        """What the annotations hold, by dialogue."""
        return read_annotations(self.annotations) if self.annotations else {}

    def about(self) -> dict[str, Any]:
        held = None if self.annotations is None else sha256_file(Path(self.annotations))
        return {**super().about(), "annotations": held}

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> Bank:
        if self.source == "replay" and dialogue_id not in self.replayed:
            raise DataError("holds no facts of this dialogue; choose another source", self.annotations, dialogue_id)
        return super().open(folder, dialogue_id, services)


def asked(bank: Bank, stretches: Sequence[Stretch]) -> list[list[str]]:
    """The facts that an LLM writes (Appendix D, in our own words)."""
    schema = object_schema(facts=TEXTS)
    told = [{"messages": "\n".join(map(turn_lines, stretch))} for stretch in stretches]
    asks = [from_template("facts", "memory_facts", bank.dialogue_id, schema, ROOM, data) for data in told]
    return [texts(mapping(reply).get("facts")) for reply in bank.send(*asks)]
