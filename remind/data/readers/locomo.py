"""LoCoMo: two-person histories with questions (Maharana et al., 2024)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from remind.core.errors import named
from remind.data.dialogue import NO_INFORMATION, Corpus, Dialogue, Question
from remind.data.readers.builder import CorpusBuilder, Draft, one_per_record
from remind.data.readers.evidence import EvidenceIndex, evidence_texts
from remind.data.readers.source import Place, Source, shown

ADVERSARIAL = 5
_SESSION = re.compile(r"\s*+session_(\d++)\s*+(_date_time)?+\s*+", re.IGNORECASE | re.ASCII)
#: Annotations of a session, such as `events_session_3` and `session_3_observation`.
_ABOUT = re.compile(r"\s*+(?:[a-z]\w*_session_\d++|session_\d++_[a-z]\w*+)\s*+", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"(\d{1,2}):(\d{2})\s*([ap])m on (\d{1,2}) ([a-z]+),? (\d{4})", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def matches(source: Source) -> bool:
    return isinstance(source.first.get("conversation"), dict)


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per sample, turn ids its `dia_id`s, questions `<sample_id>-q<NNN>` counted from 000.

    Category 5 is always answered by `NO_INFORMATION`; an item of another category may have no answer.

    Raises:
        DataError: a record that lacks what it needs, a session under two keys or under a key that names no session.
    """
    return one_per_record(sources, "a sample", _sample)


def _sample(out: CorpusBuilder, place: Place, _: int, sample: dict[str, Any]) -> None:
    sample_id = place.name(sample.get("sample_id"), "sample_id")
    file = Place(place.path)
    place = file.at(sample_id)
    draft = Draft(place, sample_id)
    for listed in sessions(place, place.mapping(sample.get("conversation"), "conversation")):
        draft.session(listed.id, None if listed.time is None else iso_time(listed.time))
        for value in listed.turns:
            where, turn_id, turn = turn_of(listed.place, value)
            urls = turn.get("img_url") or []
            urls = [urls] if isinstance(urls, str) else where.sequence(urls, "img_url")
            draft.turn(where, turn_id, turn.get("speaker"), turn.get("text"), images=draft.images(where, turn, urls))
    add_questions(out, file, out.add_dialogue(draft), place.sequence(sample.get("qa", []), "qa"))


def turn_of(place: Place, value: object) -> tuple[Place, str, dict[str, Any]]:
    """Place, id and fields of a turn of a session."""
    turn = place.mapping(value, "a turn")
    turn_id = place.name(turn.get("dia_id"), "dia_id")
    return place.at(turn_id), turn_id, turn


def add_questions(out: CorpusBuilder, place: Place, dialogue: Dialogue, items: Sequence[Any]) -> None:
    """Add the questions under `qa`: ids `<dialogue id>-q<NNN>` from 000, evidence resolved to turns.

    Raises:
        DataError: an item without a question or a category, or with an answer that is no text and no number.
    """
    index = EvidenceIndex([turn.id for turn in dialogue.turns])
    for number, value in enumerate(items):
        question_id = f"{dialogue.id}-q{number:03d}"
        where = place.at(question_id)
        item = where.mapping(value, "a question")
        category = item.get("category")
        if not isinstance(category, int) or isinstance(category, bool):
            raise where.error(f"category should be a whole number, not {shown(category)}")
        question = Question(
            id=question_id,
            dialogue_id=dialogue.id,
            text=where.name(item.get("question"), "question"),
            answers=(NO_INFORMATION,) if category == ADVERSARIAL else answers_of(where, item),
            category=category,
        )
        out.add_question(where, question, index.resolve(evidence_texts(where, item.get("evidence"))))


def answers_of(place: Place, item: dict[str, Any]) -> tuple[str, ...]:
    """The gold answer as text (numbers too); empty if the item has none."""
    answer = item.get("answer")
    if answer is None:
        return ()
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if not math.isfinite(answer):
            raise place.error(f"answer should be text or a number, not {answer}")
        return (str(answer),)
    return (place.text(answer, "answer"),)


class Listed(NamedTuple):
    """A session as a conversation lists it."""

    id: str
    place: Place
    time: str | None
    turns: list[Any]


def is_session(key: str) -> bool:
    """Whether a key names a session: `session_3`, in any case and with blanks around it."""
    match = _SESSION.fullmatch(key)
    return match is not None and not match[2]


def sessions(place: Place, conversation: dict[str, Any]) -> list[Listed]:
    """The sessions of a conversation, by number.

    Raises:
        DataError: two keys for one session or its time, turns under a key that names no session, a session that is no
            list or a time that is no text.
    """
    turns: dict[str, str] = {}
    times: dict[str, str] = {}
    for key, value in conversation.items():
        match = _SESSION.fullmatch(key)
        if match is None:
            if _is_misnamed(key, value):
                raise place.error(f"turns under the key {shown(key)}; sessions are named session_<number>")
            continue
        keys = times if match[2] else turns
        number = match[1].lstrip("0") or "0"
        if number in keys:
            raise place.error(f"the keys {shown(keys[number])} and {shown(key)} name the same session")
        keys[number] = key
    listed: list[Listed] = []
    # by number, however many digits there are
    for number in sorted(turns, key=lambda digits: (len(digits), digits)):
        key, time = turns[number], times.get(number)
        entries = place.sequence(conversation[key], named(key))
        start = None if time is None else place.optional_text(conversation[time], named(time))
        listed.append(Listed(f"S{number}", place.at(key), start, entries))
    return listed


def _is_misnamed(key: str, value: object) -> bool:
    """Whether turns are listed under a key that names no session, so that they would be left out."""
    if not isinstance(value, list) or _ABOUT.fullmatch(key):
        return False
    required = {"speaker"} if key.strip().lower().startswith("session") else {"speaker", "dia_id"}
    return any(isinstance(turn, dict) and turn.keys() >= required for turn in value)


def iso_time(text: str) -> str:
    """ "1:56 pm on 8 May, 2023" as 2023-05-08T13:56, whether there is such a day or not; other words as they are."""
    match = _TIME.fullmatch(text.strip())
    if match is None or match[5][:3].lower() not in _MONTHS:
        return text
    hour = int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)
    month = _MONTHS.index(match[5][:3].lower()) + 1
    return f"{match[6]}-{month:02}-{int(match[4]):02}T{hour:02}:{match[2]}"
