"""Friends transcripts, EmoryNLP CSV: dialogue among many (Zahiri and Choi, 2018)."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

from remind.data.dialogue import Corpus, joined
from remind.data.readers.builder import CorpusBuilder, Draft
from remind.data.readers.source import Place, Record, Source, natural, shown

COLUMNS = {"Utterance", "Speaker", "Scene_ID", "Utterance_ID", "Season", "Episode"}

_NAME = r"""(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
_NAMES = re.compile(rf"\[\s*+(?:{_NAME}\s*+(?:,\s*+{_NAME}\s*+)*+)?+,?+\s*+\]")


def matches(source: Source) -> bool:
    return set(source.columns) >= COLUMNS


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per episode (`s01e02`), one session per scene (`S1`), turns `S<scene>:T<utterance>`.

    Season and Episode 1, 01 and 001 are one number. Several speakers at once are joined: `Monica Geller & Ross Geller`.

    Raises:
        DataError: a row that lacks a column, a speaker or words, a scene or an utterance that occurs twice in an
            episode.
    """
    return (piece for _, piece in _episodes(sources))


def stream_seasons(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per season (`s01`), its episodes in order, however they are spread over the files.

    Sessions are `s01e02:S1`, turns `s01e02:S1:T3`. All files are held in memory.

    Raises:
        DataError: as `stream`.
    """
    seasons: dict[str, list[Corpus]] = {}
    for season, piece in _episodes(sources):
        seasons.setdefault(season, []).append(piece)
    for season in sorted(seasons, key=natural):
        yield joined(sorted(seasons[season], key=lambda piece: natural(piece.dialogues[0].id)), season)


def _episodes(sources: Sequence[Source]) -> Iterator[tuple[str, Corpus]]:
    """The season and the dialogue of each episode."""
    out = CorpusBuilder()
    for source in sources:
        episodes: dict[tuple[str, str], list[Record]] = {}
        for place, row in source.rows():
            season = f"s{_number(place, row, 'Season')}"
            episodes.setdefault((season, f"e{_number(place, row, 'Episode')}"), []).append(Record(place, row))
        for (season, episode), records in episodes.items():
            name = f"{season}{episode}"
            out.add_dialogue(_draft(Draft(source.place.at(name), name), records))
            yield season, out.piece()
    out.end(sources)


def _draft(draft: Draft, records: Sequence[Record]) -> Draft:
    scene: str | None = None
    for place, row in records:
        if row["Scene_ID"] != scene:
            scene = row["Scene_ID"]
            draft.session(f"S{scene}")
        speaker = _speakers(place, row["Speaker"])
        turn_id = f"S{scene}:T{row['Utterance_ID']}"
        draft.turn(place, turn_id, speaker, row["Utterance"], row.get("Start_Time") or None)
    return draft


def _number(place: Place, row: dict[str, str], column: str) -> str:
    """A number with at least two digits, without further leading zeros; words as they are."""
    text = place.name(row[column], column).strip()
    return (text.lstrip("0") if text.isascii() and text.isdigit() else text).zfill(2)


def _speakers(place: Place, text: str) -> str:
    """`"['Monica Geller', 'Ross Geller']"`, or a plain name, as one speaker."""
    if not text.lstrip().startswith("["):
        return text
    # only a list of strings is given to Python's parser, which deep nesting could exhaust
    if _NAMES.fullmatch(text.strip()):
        with warnings.catch_warnings(), suppress(ValueError, SyntaxError):
            warnings.simplefilter("ignore")
            return " & ".join(ast.literal_eval(text.strip()))
    raise place.error(f"the speaker {shown(text)} is not a list of names")
