"""Multi-Session Chat, JSON Lines: a session with the ones before it (Xu et al., 2022)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from remind.data.readers.builder import Draft, objects

_SPEAKER = re.compile(r"Speaker \d+")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per row: the previous sessions, then its own. Ids are `<file>-<initial_data_id>`.

    The files of different session counts overlap: a row of session 3 begins with the row of session 2 of the same
    `initial_data_id`. Read one file if no turn may come twice.

    Raises:
        DataError: a record that lacks what it needs.
    """
    seen: set[str] = set()
    for count, place, row in objects(paths, "a row"):
        metadata = row.get("metadata")
        given = metadata.get("initial_data_id") if isinstance(metadata, dict) else None
        name = None if given is None else f"{place.path.stem}-{place.name(given, 'initial_data_id')}"
        if name is None or name in seen:
            name = f"{place.path.stem}-row_{count:05d}"
        seen.add(name)
        draft = Draft(place, name)
        previous = place.sequence(row.get("previous_dialogs", []), "previous_dialogs")
        for number, item in enumerate([*previous, row], start=1):
            session = place.mapping(item, "a session")
            # the previous sessions say how long ago they were
            ago = None if item is row else place.optional_text(session.get("time_back"), "time_back")
            draft.session(f"S{number}", ago.strip() if ago else None)
            for index, (turn_id, where, turn) in enumerate(
                place.turns(session.get("dialog"), "dialog", f"S{number}:T{{}}")
            ):
                # speakers alternate; earlier sessions name none, and some turns give a crowd worker's number instead
                speaker = turn.get("id")
                if not isinstance(speaker, str) or not _SPEAKER.fullmatch(speaker):
                    speaker = f"Speaker {index % 2 + 1}"
                draft.turn(where, turn_id, speaker, turn.get("text"))
        yield draft
