"""What keys are expanded by: facts, keyphrases and summaries, from an LLM, from LoCoMo's files, or from the words.

Each source takes stretches of a session, which are single turns or all that count of it, and gives some texts for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from remind.data.dialogue import Session, Turn
from remind.data.readers.builder import Place, records
from remind.data.readers.locomo import EvidenceIndex, sessions
from remind.llm.asking import Unusable, plain
from remind.llm.request import ChatModel, MemoryStage, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema, read_value
from remind.states.pyramid import one_line, turn_text
from remind.text.words import fillers, key_sentences, rarity, sentences, stems, telling, words

Kind = Literal["userfact", "keyphrase", "summ"]
Stretch = tuple[Turn, ...]

STAGES: Mapping[Kind, MemoryStage] = {"userfact": "facts", "keyphrase": "keyphrases", "summ": "summaries"}
#: Room for a reply in tokens (LongMemEval, Appendix D; its 100 for keyphrases hold no JSON).
ROOM: Mapping[Kind, int] = {"userfact": 2000, "keyphrase": 300, "summ": 500}
#: Keyphrases of a stretch, and words of a summary, at most.
MOST, WORDS = 10, 120
_PHRASE_WORDS = 4

_TEXTS = {"type": "array", "items": {"type": "string"}}
_ABOUT = re.compile(r"session_(\d+)_(?:observation|summary)", re.ASCII)


def extractive(kind: Kind, session: Session, stretches: Sequence[Stretch]) -> list[list[str]]:
    """Key sentences as facts and summaries, runs of rare words as keyphrases; rare in the session."""
    weights = rarity([stems(turn_text(turn)) for turn in session.turns])
    found = []
    for stretch in stretches:
        said = sentences(stretch)
        if kind != "keyphrase":
            chosen = key_sentences(said, [telling(sentence.text, weights) for sentence in said])
            found.append(chosen.splitlines())
            continue
        runs: dict[str, float] = {}
        for sentence in said:
            run: list[str] = []
            for word in [*words(sentence.text), ""]:
                if word and word not in fillers() and len(run) < _PHRASE_WORDS:
                    run.append(word)
                elif run:
                    runs.setdefault(" ".join(run), telling(" ".join(run), weights))
                    run = [word] if word and word not in fillers() else []
        best = sorted(runs, key=lambda run: -runs[run])[:MOST]
        found.append([run for run in runs if run in best])
    return found


def gist(session: Session, turns: Stretch) -> str:
    """Key sentences of turns of one speaker, who is named once, on one line."""
    name = f"{one_line(turns[0].speaker)}: "
    (lines,) = extractive("summ", session, [turns])
    said = " ".join(line.removeprefix(name) for line in lines) or one_line(turn_text(turns[0])).removeprefix(name)
    return name + said


@dataclass(frozen=True)
class Annotations:
    """What LoCoMo's file holds of one dialogue, written by an LLM.

    Attributes:
        facts: by session, each with the ids of the turns it is from.
        summaries: by session.
        turns: ids by session.
    """

    facts: dict[str, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def replay(self, kind: Kind, session: Session, stretches: Sequence[Stretch]) -> list[list[str]]:
        """The facts that are from a turn of the stretch, or the session's summary.

        Nothing is told of turns that the session lacks: neither facts that are from such a turn too, nor the summary.
        """
        there = {turn.id for turn in session.turns}
        if kind == "summ":
            known = set(self.turns.get(session.id, ())) == there
            return [_sentences(self.summaries.get(session.id, "")) if known else [] for _ in stretches]
        facts = [(text, ids) for text, ids in self.facts.get(session.id, ()) if there.issuperset(ids)]
        return [[text for text, ids in facts if not {t.id for t in one}.isdisjoint(ids)] for one in stretches]


def read_annotations(path: str | Path) -> dict[str, Annotations]:
    """The `observation` and `session_summary` fields of LoCoMo's file by dialogue.

    Raises:
        DataError: a file that cannot be read, or a field that is not as in LoCoMo.
    """
    held: dict[str, Annotations] = {}
    for place, value in records(path):
        sample = place.mapping(value, "a sample")
        sample_id = place.name(sample.get("sample_id"), "sample_id")
        here = Place(place.path).at(sample_id)
        one = held[sample_id] = Annotations()
        for session_id, _, turns in sessions(here, here.mapping(sample.get("conversation"), "conversation")):
            one.turns[session_id] = tuple(turn_id for _, turn_id, _ in turns)
        index = EvidenceIndex([name for names in one.turns.values() for name in names])
        for session_id, text in _by_session(here, sample, "session_summary"):
            one.summaries[session_id] = here.text(text, "session_summary")
        for session_id, speakers in _by_session(here, sample, "observation"):
            for rows in here.mapping(speakers, "observation").values():
                one.facts.setdefault(session_id, []).extend(
                    _fact(here, index, row) for row in here.sequence(rows, "observation")
                )
    return held


def request(kind: Kind, dialogue_id: str, stretch: Stretch) -> Request:
    """What is asked of an LLM for one stretch (Appendix D, in our own words)."""
    text = "\n".join(map(turn_text, stretch))
    code = code_for([text])
    stage = STAGES[kind]
    schema = None if kind == "summ" else object_schema(**{stage: _TEXTS})
    limits = {"keyphrase": {"most": MOST}, "summ": {"words": WORDS}}.get(kind, {})
    messages = fenced("messages", text, code)
    return from_template(
        stage, f"memory_{stage}", dialogue_id, schema, ROOM[kind], code=code, messages=messages, **limits
    )


def read(kind: Kind, reply: Reply) -> list[str]:
    """The texts of a reply, each on one line and once; a bare JSON list will do. Raises Unusable."""
    if kind == "summ":
        if not (text := plain(reply.text)):
            raise Unusable("the summary is empty")
        return _sentences(text)
    value = reply.value.get(STAGES[kind]) if isinstance(reply.value, Mapping) else reply.value
    if not isinstance(value, list):
        try:
            value = read_value(reply.text, _TEXTS, reply.finished)
        except NotValid as error:
            raise Unusable(str(error)) from None
    texts = [plain(item) for item in value if isinstance(item, str)]
    return [text for text in dict.fromkeys(texts) if text]


def asked(
    chat: ChatModel, kind: Kind, dialogue_id: str, session: Session, stretches: Sequence[Stretch]
) -> tuple[list[list[str]], list[str]]:
    """The texts that an LLM writes, and why key sentences or phrases stand for some of them, a line each."""
    replies = chat.complete([request(kind, dialogue_id, stretch) for stretch in stretches])
    found, reasons = [], []
    for stretch, reply in zip(stretches, replies, strict=True):
        try:
            if reply.failure not in (None, "invalid"):
                raise Unusable(f"{reply.failure}: {reply.message}")
            found.append(read(kind, reply))
        except Unusable as error:
            reasons.append(f"{STAGES[kind]} of {stretch[0].id}: {error}")
            found += extractive(kind, session, [stretch])
    return found, reasons


def _sentences(text: str) -> list[str]:
    return [sentence.text for sentence in sentences([Turn("", "", text)])]


def _by_session(place: Place, sample: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Session ids and values of a field whose keys are such as `session_3_summary`."""
    entries = place.mapping(sample.get(name, {}), name)
    return [(f"S{int(match[1])}", value) for key, value in entries.items() if (match := _ABOUT.fullmatch(key))]


def _fact(place: Place, index: EvidenceIndex, row: Any) -> tuple[str, tuple[str, ...]]:
    parts = place.sequence(row, "a fact")
    if len(parts) != 2:
        raise place.error(f"a fact should be its text and its turns, not {len(parts)} values")
    return place.text(parts[0], "a fact"), index.resolve(place, parts[1]).turn_ids
