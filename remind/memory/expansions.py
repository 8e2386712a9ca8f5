"""What keys are expanded by: facts, keyphrases and summaries, from an LLM, from LoCoMo's files, or from the words.

Each source takes stretches of a session, which are single turns or all that count of it, and gives some texts for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.data.dialogue import Session, Turn
from remind.data.readers.annotations import Annotations, read_annotations
from remind.llm.request import MemoryStage, Request, from_template
from remind.llm.structured import object_schema
from remind.memory.bank import mapping
from remind.memory.base import TEXTS, System, texts, words
from remind.states.pyramid import one_line, turn_text
from remind.text.words import key_sentences, rarity, sentences, stems, telling

if TYPE_CHECKING:
    from remind.memory.bank import Bank
from remind.memory.base import Services

Kind = Literal["userfact", "keyphrase", "summ"]
Stretch = tuple[Turn, ...]

STAGES: Mapping[Kind, MemoryStage] = {"userfact": "facts", "keyphrase": "keyphrases", "summ": "summaries"}
#: Room for a reply in tokens (LongMemEval, Appendix D; its 100 for keyphrases hold no JSON).
ROOM: Mapping[Kind, int] = {"userfact": 2000, "keyphrase": 300, "summ": 500}
#: Keyphrases of a stretch, and words of a summary, at most.
MOST, WORDS = 10, 120


def gist(session: Session, turns: Stretch) -> str:
    """Key sentences of turns of one speaker, those with words that are rare in the session; the speaker is named once,
    and all on one line."""
    weights, parts = rarity([stems(turn_text(turn)) for turn in session.turns]), sentences(turns)
    name = f"{one_line(turns[0].speaker)}: "
    lines = key_sentences(parts, [telling(part.text, weights) for part in parts]).splitlines()
    said = " ".join(line.removeprefix(name) for line in lines) or one_line(turn_text(turns[0])).removeprefix(name)
    return name + said


def replay(held: Annotations, kind: Kind, session: Session, stretches: Sequence[Stretch]) -> list[list[str]]:
    """LoCoMo's facts that are from a turn of the stretch, or its summary of the session.

    Nothing is told of turns that the session lacks: neither facts that are from such a turn too, nor the summary.
    """
    there = {turn.id for turn in session.turns}
    if kind == "summ":
        known = set(held.turns.get(session.id, ())) == there
        return [_sentences(held.summaries.get(session.id, "")) if known else [] for _ in stretches]
    facts = [(text, ids) for text, ids in held.facts.get(session.id, ()) if there.issuperset(ids)]
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


def request(kind: Kind, dialogue_id: str, stretch: Stretch) -> Request:
    """What is asked of an LLM for one stretch (Appendix D, in our own words)."""
    stage, limits = STAGES[kind], {"keyphrase": {"most": MOST}, "summ": {"words": WORDS}}.get(kind, {})
    schema = None if kind == "summ" else object_schema(**{stage: TEXTS})
    data = {"messages": "\n".join(map(turn_text, stretch))}
    return from_template(stage, f"memory_{stage}", dialogue_id, schema, ROOM[kind], data, **limits)


def asked(bank: Bank, kind: Kind, stretches: Sequence[Stretch]) -> list[list[str]]:
    """The texts that an LLM writes."""
    replies = bank.send(*(request(kind, bank.dialogue_id, stretch) for stretch in stretches))
    if kind == "summ":
        return [_sentences(words(reply)) if reply.failure is None else [] for reply in replies]
    return [texts(mapping(reply).get(STAGES[kind])) for reply in replies]


def _sentences(text: str) -> list[str]:
    return [sentence.text for sentence in sentences([Turn("", "", text)])]
