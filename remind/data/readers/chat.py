"""Chat JSON Lines: one's own dialogues, a whole one or one turn per line; OpenAI messages too."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import shown
from remind.data.dialogue import Corpus
from remind.data.readers import refmem
from remind.data.readers.builder import Draft, Place, objects

#: Where a turn may name its speaker, most specific first.
_SPEAKER = ("speaker", "name", "role")
_TURNS = ("messages", "turns")
_WORDS = ("text", "content")
#: A day as 2024-03-01, 1.3.2024, 1 March 2024 or March 1st, 2024.
_DAY = (
    re.compile(r"\d+[-./]\d+[-./]\d+"),
    re.compile(r"(?<![\d:])\d+(?:st|nd|rd|th)?\.? (?:of )?[^\W\d]{3,}\.?,? \d{4}(?![-./\d])"),
    re.compile(r"[^\W\d]{3,}\.? \d+(?:st|nd|rd|th)?,? \d{4}(?![-./\d])"),
)
#: A record with one of these may be of this format.
KEYS = (*_TURNS, *_WORDS, "role", "questions")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """A line is a dialogue `{"id"?, "messages" | "turns": […], "questions"?: […]}`, a turn, or
    `{"dialogue"?, "questions": […]}`.

    A turn is `{"speaker" | "name" | "role", "text" | "content", "time"?, "session"?, "dialogue"?, "id"?, "images"?}`;
    `content` may be a list of parts (see `Draft.turn`); an image is a path, a URL or an object
    `{"path" | "url", "caption"?, "source"?}`. Default ids: `<file>-<line>` for a whole dialogue, `<file>` for single
    turns, sessions `S1`, turns `<session>:T<n>`. A session begins at the time of its first turn; where no turn names
    its session, another one begins with each day that their times name. Messages of role tool or function are left out.
    For questions see `_Chat._ask`.

    Raises:
        DataError: a turn without speaker, an id twice, a session that comes back after another.
        ImagePathError: a local image that is missing or leaves the folder of the file.
    """
    for path in paths:
        # questions about a whole dialogue may follow it, so the last one is held; a later turn may belong to any
        # dialogue of single turns: from the first turn on all are held till the file ends
        held: dict[str, _Chat] = {}
        whole = True
        for number, place, record in objects([path], "a line"):
            turns = _first(record, _TURNS)
            key, name = ("dialogue", path.stem) if turns is None else ("id", f"{path.stem}-{number:05d}")
            name = place.optional_name(record.get(key), key) or name
            if turns is None:
                whole &= name in held
                chat = held.setdefault(name, _Chat(Place(path).at(name), name))
                if "questions" not in record or _first(record, _WORDS) is not None:
                    chat.add(place, record)
            elif name in held:
                raise place.error(f"dialogue id {shown(name)} occurs twice")
            else:
                if whole:
                    yield from held.values()
                    held.clear()
                chat = held[name] = _Chat(place.at(name), name)
                for _, where, turn in chat.place.turns(turns, "messages", "turn {}"):
                    chat.add(where, turn)
            asked = place.sequence(record.get("questions") or [], "questions")
            chat.asked += [(place, place.mapping(value, "a question")) for value in asked]
        yield from held.values()


def _day_in(time: str) -> str:
    """The day that a time names, as it is written; "" without."""
    return next((found[0].replace(",", "") for form in _DAY if (found := form.search(time))), "")


def _first(record: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


class _Chat(Draft):
    """A dialogue to which turns are added one by one, and at the end the questions about it."""

    def __init__(self, place: Place, name: str) -> None:
        super().__init__(place, name)
        self.asked: list[tuple[Place, dict[str, Any]]] = []
        self._session: str | None = None
        self._count, self._named, self._day = 0, False, ""

    def add(self, place: Place, turn: dict[str, Any]) -> None:
        if turn.get("role") in ("tool", "function"):
            self.blank += 1
            return
        given = place.optional_name(turn.get("session"), "session")
        time = place.time(turn.get("time"), "time")
        self._named |= given is not None
        day = "" if self._named else _day_in(time or "")
        session = given or self._session or "S1"
        if day and self._day not in ("", day):
            session = f"S{len(self._sessions) + 1}"
        elif day and not self._day and self._session:
            # what came before had no time
            self._sessions[session] = time, self._turns
        self._day = day or self._day
        if session != self._session:
            self.session(session, time)
            self._session, self._count = session, 0
        self._count += 1
        turn_id = place.optional_name(turn.get("id"), "id") or f"{session}:T{self._count}"
        listed = [one for one in place.sequence(turn.get("images") or [], "images") if one is not None]
        named = [{"path": one} if isinstance(one, str) else place.mapping(one, "an image") for one in listed]
        images = list(filter(None, (self.shown(place, one) for one in named)))
        self.turn(place, turn_id, _first(turn, _SPEAKER), _first(turn, _WORDS), time, images)

    def corpus(self) -> Corpus:
        for number, (place, asked) in enumerate(self.asked):
            self._ask(place, f"{self.id}-q{number:03d}", asked)
        return super().corpus()

    def _ask(self, place: Place, name: str, asked: dict[str, Any]) -> None:
        """Add a question: the fields of `refmem`'s without type and context, all but the text optional.

        The text may be `text`, answers `answer`; one answer or reference needs no list. An answer may be the text of an
        option in place of its letter. Without a format a question with options is single, or multi if it has several
        answers.
        """
        row = {**asked, "id": name if asked.get("id") is None else asked["id"]}
        row["question"] = _first(asked, ("question", "text"))
        answers, evidence = _first(asked, ("answers", "answer")), asked.get("evidence")
        row["evidence"] = [evidence] if isinstance(evidence, str | int) else evidence
        answers = place.sequence(
            [] if answers is None else [answers] if isinstance(answers, str | int | float) else answers, "answers"
        )
        options = place.sequence(row.get("options") or [], "options")
        row["options"] = [str(option) if isinstance(option, int | float) else option for option in options]
        letters = dict(zip(map(str, options), string.ascii_uppercase, strict=False))
        texts = [str(answer) if isinstance(answer, int | float) else answer for answer in answers]
        row["answers"] = [text if text in letters.values() else letters.get(str(text), text) for text in texts]
        if row.get("format") is None:
            row["format"] = "direct" if not options else "multi" if len(answers) > 1 else "single"
        refmem.add_question(self, place, row)
