"""Friends transcripts, EmoryNLP CSV: dialogue among many (Zahiri and Choi, 2018)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from remind.core.errors import shown
from remind.data.readers.builder import Draft, Place, Record, natural, rows

COLUMNS = {"Utterance", "Speaker", "Scene_ID", "Utterance_ID", "Season", "Episode"}

#: A name in quotes, as Python writes strings.
_NAME = re.compile(r"""'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)\"""")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per episode (`s01e02`), one session per scene (`S1`), turns `S<scene>:T<utterance>`.

    Season and Episode 1, 01 and 001 are one number. Several speakers at once are joined: `Monica Geller & Ross Geller`.

    Raises:
        DataError: a row that lacks a column or a speaker, a scene or an utterance that occurs twice in an episode.
    """
    for path in paths:
        for (season, episode), found in _episodes([path]).items():
            yield _draft(path, season + episode, {"": found})


def season_drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per season (`s01`), its episodes in order, however they are spread over the files.

    Sessions are `s01e02:S1`, turns `s01e02:S1:T3`. All files are held in memory.

    Raises:
        DataError: as `drafts`.
    """
    ordered = sorted(_episodes(paths).items(), key=lambda item: list(map(natural, item[0])))
    for season, episodes in groupby(ordered, key=lambda item: item[0][0]):
        yield _draft(paths[0], season, {f"{season}{episode}:": found for (_, episode), found in episodes})


def _episodes(paths: Sequence[Path]) -> dict[tuple[str, str], list[Record]]:
    """The rows of each episode by season and episode, in the order of the files."""
    episodes: dict[tuple[str, str], list[Record]] = {}
    for path in paths:
        for place, row in rows(path):
            key = (f"s{_number(place, row, 'Season')}", f"e{_number(place, row, 'Episode')}")
            episodes.setdefault(key, []).append(Record(place, row))
    return episodes


def _draft(path: Path, name: str, episodes: Mapping[str, Sequence[Record]]) -> Draft:
    """A dialogue of the rows of its episodes, by what their ids begin with."""
    draft, before = Draft(Place(path).at(name), name), ""
    for prefix, (place, row) in ((prefix, one) for prefix, found in episodes.items() for one in found):
        scene = f"{prefix}S{row['Scene_ID']}"
        if scene != before:
            draft.session(scene)
        before = scene
        speaker = row["Speaker"]
        if speaker.lstrip().startswith("["):
            if _NAME.sub("", speaker).strip("[], "):
                raise place.error(f"the speaker {shown(speaker)} is not a list of names")
            speaker = " & ".join(re.sub(r"\\(.)", r"\1", one or other) for one, other in _NAME.findall(speaker))
        turn_id = f"{scene}:T{row['Utterance_ID']}"
        draft.turn(place, turn_id, speaker, row["Utterance"], row.get("Start_Time") or None)
    return draft


def _number(place: Place, row: dict[str, str], column: str) -> str:
    """A number with at least two digits, without further leading zeros; words as they are."""
    text = place.name(row[column], column).strip()
    return (text.lstrip("0") if text.isascii() and text.isdigit() else text).zfill(2)
