"""LoCoMo: two-person histories with questions (Maharana et al., 2024); sessions and evidence as in REALTALK too.

Annotators name turns `D<session>:<turn>`, but also `D8:6; D9:17`, `D:11:26`, `D30:05`, `D17;39`, `D1:3-5`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import shown
from remind.data.dialogue import NO_INFORMATION, Image, Question
from remind.data.readers.builder import Draft, Place, Resolved, objects

ADVERSARIAL = 5
#: The key of a session or of its time, in any case and with any marks or blanks between its parts.
SESSION = re.compile(r"[\W_]*+session[\W_]*+(\d{1,18})[\W_]*+(date_time)?+[\W_]*+", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}):(\d{2})\s*([ap])m on (\d{1,2}) ([a-z]+),? (\d{4})", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ID = re.compile(r"D(\d{1,6}):(\d{1,6})", re.ASCII)
_TOKEN = re.compile(
    r"""
      D\s*+[:;.,]?+\s*+(?P<session>\d{1,6}) (?:\s*+[:;.,]\s*+|\s++) (?P<turn>\d{1,6})(?!\d)
    | (?P<bare_session>\d{1,6}) \s*+:\s*+ (?P<bare_turn>\d{1,6})(?!\d)
    | (?P<number>\d{1,6})(?![\d\w])
    | (?P<range>[-–—~]|to\b)
    | (?:and\b|[\s,;.:&+/|()\[\]'"])+
    | (?P<other>[^\s,;.:&+/|()\[\]'"]+)
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per sample, turn ids its `dia_id`s, questions `<sample_id>-q<NNN>` counted from 000.

    Category 5 is always answered by `NO_INFORMATION`; an item of another category may have no answer.

    Raises:
        DataError: a record that lacks what it needs, a session under two keys.
    """
    for _, place, sample in objects(paths, "a sample"):
        name = place.name(sample.get("sample_id"), "sample_id")
        place = Place(place.path)
        draft = Draft(place.at(name), name)
        conversation = draft.place.mapping(sample.get("conversation"), "conversation")
        for session_id, time, turns in sessions(draft.place, conversation):
            draft.session(session_id, None if time is None else iso_time(time))
            for where, turn_id, turn in turns:
                images = remote_images(draft, where, turn)
                draft.turn(where, turn_id, turn.get("speaker"), turn.get("text"), images=images)
        add_questions(draft, place, sample.get("qa") or [])
        yield draft


def sessions(
    place: Place, conversation: dict[str, Any]
) -> Iterator[tuple[str, str | None, list[tuple[Place, str, dict[str, Any]]]]]:
    """The sessions of a conversation by number: id, time, and place, id and fields of each turn.

    Raises:
        DataError: two keys for one session or its time, a session that is no list, a time that is no text, a turn
            without `dia_id`.
    """
    keys: dict[tuple[int, bool], str] = {}
    for key in conversation:
        if match := SESSION.fullmatch(key):
            named_by = (int(match[1]), match[2] is None)
            if named_by in keys:
                raise place.error(f"the keys {shown(keys[named_by])} and {shown(key)} name the same session")
            keys[named_by] = key
    for number, listed in sorted(keys):
        if not listed:
            continue
        key, time = keys[number, True], keys.get((number, False), "")
        here = place.at(key)
        turns = []
        for value in place.sequence(conversation[key] or [], key):
            turn = here.mapping(value, "a turn")
            turn_id = here.name(turn.get("dia_id"), "dia_id")
            turns.append((here.at(turn_id), turn_id, turn))
        yield f"S{number}", place.optional_text(conversation.get(time), time), turns


def remote_images(draft: Draft, place: Place, turn: dict[str, Any]) -> list[Image]:
    """Images of a turn by their URLs; `blip_caption` describes the first, or an image without a URL."""
    caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
    urls = turn.get("img_url") or []
    sources = [url for url in ([urls] if isinstance(urls, str) else place.sequence(urls, "img_url")) if url]
    return [
        draft.image(place, None, None if number else caption, place.optional_text(source, "img_url"))
        for number, source in enumerate(sources or ([None] if caption else []))
    ]


def add_questions(draft: Draft, place: Place, items: object) -> None:
    """Add the questions under `qa`: ids `<dialogue id>-q<NNN>` from 000, evidence resolved to turns.

    Raises:
        DataError: an item without a question or a category, or with an answer that is no text and no number.
    """
    index = EvidenceIndex(draft.turn_ids)
    for number, value in enumerate(draft.place.sequence(items, "qa")):
        where = place.at(f"{draft.id}-q{number:03d}")
        item = where.mapping(value, "a question")
        category = item.get("category")
        if not isinstance(category, int) or isinstance(category, bool):
            raise where.error(f"category should be a whole number, not {shown(category)}")
        question = Question(
            id=f"{draft.id}-q{number:03d}",
            dialogue_id=draft.id,
            text=where.name(item.get("question"), "question"),
            answers=(NO_INFORMATION,) if category == ADVERSARIAL else answers_of(where, item),
            category=category,
        )
        draft.question(where, question, index.resolve(where, item.get("evidence")))


def answers_of(place: Place, item: dict[str, Any]) -> tuple[str, ...]:
    """The gold answer as text (numbers too); empty if the item has none."""
    answer = item.get("answer")
    if answer is None:
        return ()
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    return (str(answer) if number else place.text(answer, "answer"),)


def iso_time(text: str) -> str:
    """ "1:56 pm on 8 May, 2023" as 2023-05-08T13:56, whether there is such a day or not; other words as they are."""
    match = _TIME.fullmatch(text.strip())
    if match is None or match[5][:3].lower() not in _MONTHS:
        return text
    hour = int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)
    month = _MONTHS.index(match[5][:3].lower()) + 1
    return f"{match[6]}-{month:02}-{int(match[4]):02}T{hour:02}:{match[2]}"


class EvidenceIndex:
    """The turn ids of one dialogue, in order, by which references resolve."""

    def __init__(self, turn_ids: Iterable[str]) -> None:
        self._ids = list(turn_ids)
        self._position = {turn_id: position for position, turn_id in enumerate(self._ids)}
        self._by_number: dict[tuple[int, int], str] = {}
        for turn_id in self._ids:
            if match := _ID.fullmatch(turn_id):
                self._by_number.setdefault((int(match[1]), int(match[2])), turn_id)
        self._ordered = sorted(self._by_number)

    def resolve(self, place: Place, value: object) -> Resolved:
        """Resolve an `evidence` field: none, one or a list of texts, or numbers as their digits. Blanks name nothing.

        A range names its ends and every turn between them: by number within a session, by position across sessions.
        A number alone continues the session before it (`D1:3, 5`). Text that is no reference dangles.

        Raises:
            DataError: neither text nor a number.
        """
        # counted, since a hostile file can name the same turns very often
        turns: Counter[str] = Counter()
        dangling: list[str] = []
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                whole = isinstance(item, int) and not isinstance(item, bool)
                self._read(str(item) if whole else place.text(item, "evidence"), turns, dangling)
        return Resolved(tuple(turns), tuple(dangling), sum(turns.values()) + len(dangling))

    def _read(self, text: str, turns: Counter[str], dangling: list[str]) -> None:
        if name := next((name for name in (text, text.strip()) if name in self._position), None):
            turns[name] += 1
            return
        last: tuple[int, int] | None = None
        in_range = False
        junk: list[str] = []
        for token in _TOKEN.finditer(text):
            if token["range"]:
                in_range = last is not None
                continue
            if token["session"]:
                here = (int(token["session"]), int(token["turn"]))
            elif token["bare_session"]:
                here = (int(token["bare_session"]), int(token["bare_turn"]))
            elif token["number"] and last is not None:
                here = (last[0], int(token["number"]))
            else:
                if token["number"] or token["other"]:
                    junk.append(token[0])
                continue
            if in_range and last is not None:
                turns.update(self._between(last, here))
            if here in self._by_number:
                turns[self._by_number[here]] += 1
            else:
                dangling.append(f"D{last[0]}:{token[0]}" if token["number"] and last else token[0].strip())
            last, in_range = here, False
        if junk:
            dangling.append(" ".join(junk) if last else text.strip())

    def _between(self, first: tuple[int, int], last: tuple[int, int]) -> list[str]:
        """Turns strictly between two references."""
        if first[0] == last[0]:
            inside = self._ordered[bisect_right(self._ordered, first) : bisect_left(self._ordered, last)]
            return [self._by_number[number] for number in inside]
        if first not in self._by_number or last not in self._by_number:
            return []
        start, end = (self._position[self._by_number[number]] for number in (first, last))
        return self._ids[start + 1 : end]
