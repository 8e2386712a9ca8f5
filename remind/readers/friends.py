"""Friends transcripts, EmoryNLP CSV: dialogue among many (Zahiri and Choi, 2018)."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from remind.dialogue import Corpus
from remind.readers.builder import CorpusBuilder, Draft
from remind.readers.source import Place, Record, Source

COLUMNS = {"Utterance", "Speaker", "Scene_ID", "Utterance_ID", "Season", "Episode"}


def matches(source: Source) -> bool:
    return set(source.columns) >= COLUMNS


def read(sources: Sequence[Source]) -> Corpus:
    """One dialogue per episode (`s01e02`), one session per scene (`S1`), turns `S<scene>:T<utterance>`.

    Words said by several at once have the speaker `Monica Geller & Ross Geller`.

    Raises:
        DataError: a row that lacks a column, a speaker or words.
    """
    out = CorpusBuilder()
    for source in sources:
        episodes: dict[str, list[Record]] = {}
        for record in source.rows():
            place, row = record
            episodes.setdefault(f"s{_number(place, row, 'Season')}e{_number(place, row, 'Episode')}", []).append(record)
        for episode, records in episodes.items():
            draft = Draft(source.place.at(episode), episode)
            scene: str | None = None
            for place, row in records:
                if row["Scene_ID"] != scene:
                    scene = row["Scene_ID"]
                    draft.session(f"S{scene}")
                speaker = _speakers(place, row["Speaker"])
                turn_id = f"S{scene}:T{row['Utterance_ID']}"
                draft.turn(place, turn_id, speaker, row["Utterance"], row.get("Start_Time") or None)
            out.add_dialogue(draft)
    return out.corpus(sources)


def _number(place: Place, row: dict[str, str], column: str) -> str:
    return place.name(row[column], column).strip().zfill(2)


def _speakers(place: Place, text: str) -> str:
    """`"['Monica Geller', 'Ross Geller']"`, or a plain name, as one speaker."""
    if not text.lstrip().startswith("["):
        return text
    try:
        names = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise place.error(f"the speaker {text[:80]!r} is not a list of names")
    return " & ".join(names)
