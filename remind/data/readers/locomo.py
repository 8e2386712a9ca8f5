"""LoCoMo: two-person histories with questions (Maharana et al., 2024)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from remind.data.dialogue import NO_INFORMATION, Corpus, Question
from remind.data.readers.builder import CorpusBuilder, Draft
from remind.data.readers.evidence import EvidenceIndex, written
from remind.data.readers.source import Place, Source, shown

ADVERSARIAL = 5
_SESSION = re.compile(r"\s*+session_(\d++)\s*+(_date_time)?+\s*+", re.IGNORECASE | re.ASCII)
#: What is told about a session beside it, as `events_session_3` and `session_3_observation`.
_ABOUT = re.compile(r"\s*+(?:[a-z]\w*_session_\d++|session_\d++_[a-z]\w*+)\s*+", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"(\d{1,2}):(\d{2})\s*([ap])m on (\d{1,2}) ([a-z]+),? (\d{4})", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def matches(source: Source) -> bool:
    return isinstance(source.first.get("conversation"), dict)


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """One dialogue per sample, turn ids its `dia_id`s, questions `<sample_id>-q<NNN>` counted from 000.

    Category 5 is answered by `NO_INFORMATION`, whatever the item says; an item of another category without an answer
    has none.

    A piece is one sample.

    Raises:
        DataError: a record that lacks what it needs, a session under two keys or under one that is no session's.
    """
    out = CorpusBuilder()
    for source in sources:
        for place, value in source.records:
            sample = place.mapping(value, "a sample")
            sample_id = place.name(sample.get("sample_id"), "sample_id")
            _sample(out, source.place, sample_id, sample)
            yield out.piece()
    out.end(sources)


class Listed(NamedTuple):
    """A session as a conversation lists it."""

    id: str
    place: Place
    time: str | None
    turns: list[Any]


def is_session(key: str) -> bool:
    """Whether turns stand under that key: `session_3`, in capitals or with blanks around it too."""
    match = _SESSION.fullmatch(key)
    return match is not None and not match[2]


def sessions(place: Place, conversation: dict[str, Any]) -> list[Listed]:
    """The sessions of a conversation, by number.

    Raises:
        DataError: two keys for one session or its time, turns under a key that is no session's, a session that is no
            list or a time that is no text.
    """
    turns: dict[str, str] = {}
    times: dict[str, str] = {}
    for key, value in conversation.items():
        match = _SESSION.fullmatch(key)
        if match is None:
            if _is_stray(key, value):
                raise place.error(f"turns stand under the key {shown(key)}; sessions are named session_<number>")
            continue
        found = times if match[2] else turns
        number = match[1].lstrip("0") or "0"
        if number in found:
            raise place.error(f"the keys {shown(found[number])} and {shown(key)} name the same session")
        found[number] = key
    listed: list[Listed] = []
    # by number, however many digits there are
    for number in sorted(turns, key=lambda digits: (len(digits), digits)):
        key, time = turns[number], times.get(number)
        entries = place.sequence(conversation[key], _quoted(key))
        told = None if time is None else place.optional_text(conversation[time], _quoted(time))
        listed.append(Listed(f"S{number}", place.at(key), told, entries))
    return listed


def _quoted(key: str) -> str:
    """A key without what would break a line or make it long."""
    return shown(key)[1:-1]


def _is_stray(key: str, value: object) -> bool:
    """Whether a session stands there that would be passed over for its name."""
    if not isinstance(value, list) or _ABOUT.fullmatch(key):
        return False
    marks = {"speaker"} if key.strip().lower().startswith("session") else {"speaker", "dia_id"}
    return any(isinstance(turn, dict) and turn.keys() >= marks for turn in value)


def _sample(out: CorpusBuilder, file: Place, sample_id: str, sample: dict[str, Any]) -> None:
    place = file.at(sample_id)
    conversation = place.mapping(sample.get("conversation"), "conversation")
    draft = Draft(place, sample_id)
    for listed in sessions(place, conversation):
        draft.session(listed.id, None if listed.time is None else iso_time(listed.time))
        for turn in listed.turns:
            _turn(draft, listed.place, turn)
    dialogue = out.add_dialogue(draft)
    index = EvidenceIndex([turn.id for turn in dialogue.turns])
    for number, item in enumerate(place.sequence(sample.get("qa", []), "qa")):
        where = file.at(f"{sample_id}-q{number:03d}")
        item = where.mapping(item, "a question")
        category = category_of(where, item)
        question = Question(
            id=f"{sample_id}-q{number:03d}",
            dialogue_id=sample_id,
            text=where.name(item.get("question"), "question"),
            answers=(NO_INFORMATION,) if category == ADVERSARIAL else answers_of(where, item),
            category=category,
        )
        out.add_question(where, question, index.resolve(written(where, item.get("evidence"))))


def category_of(place: Place, item: dict[str, Any]) -> int:
    category = item.get("category")
    if not isinstance(category, int) or isinstance(category, bool):
        raise place.error(f"category should be a whole number, not {shown(category)}")
    return category


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


def _turn(draft: Draft, place: Place, value: object) -> None:
    turn = place.mapping(value, "a turn")
    turn_id = place.name(turn.get("dia_id"), "dia_id")
    place = place.at(turn_id)
    caption = place.optional_text(turn.get("blip_caption"), "blip_caption")
    urls = turn.get("img_url") or []
    urls = [urls] if isinstance(urls, str) else place.sequence(urls, "img_url")
    images = [
        draft.image(place, caption=caption if number == 0 else None, source=place.text(url, "img_url"))
        for number, url in enumerate(urls)
    ]
    if caption and not images:
        images = [draft.image(place, caption=caption)]
    draft.turn(place, turn_id, turn.get("speaker"), turn.get("text"), images=images)


def iso_time(text: str) -> str:
    """ "1:56 pm on 8 May, 2023" as 2023-05-08T13:56; other words as they are."""
    match = _TIME.fullmatch(text.strip())
    if match is None or match[5][:3].lower() not in _MONTHS:
        return text
    hour = int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)
    try:
        time = datetime(int(match[6]), _MONTHS.index(match[5][:3].lower()) + 1, int(match[4]), hour, int(match[2]))
    except ValueError:
        return text
    return time.isoformat(timespec="minutes")
