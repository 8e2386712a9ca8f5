"""LoCoMo: two-person histories with questions (Maharana et al., 2024); sessions and evidence as in REALTALK too.

Annotators name turns `D<session>:<turn>`, but also `D8:6; D9:17`, `D:11:26`, `D30:05`, `D17;39`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import shown
from remind.data.dialogue import NO_INFORMATION, Image, Question
from remind.data.readers.builder import Draft, Place, Resolved, iso_time, objects, time_form

ADVERSARIAL = 5
#: The key of a session; that of its time ends in `_date_time`.
SESSION = re.compile(r"session_(\d{1,18})", re.ASCII)
#: "1:56 pm on 8 May, 2023".
_TIME = time_form(r"{hour}:{minute}\s*{half} on {day} {month},? {year}")
_REFERENCE = re.compile(r"D[\s:;.,]*(\d{1,6})[\s:;.,]+(\d{1,6})(?!\d)", re.IGNORECASE | re.ASCII)
_ABOUT = re.compile(r"session_(\d+)_observation", re.ASCII)
#: Facts of one dialogue by session, each with the ids of the turns it is from.
Annotations = dict[str, list[tuple[str, tuple[str, ...]]]]


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per sample, turn ids its `dia_id`s, questions `<sample_id>-q<NNN>` counted from 000.

    Category 5 is always answered by `NO_INFORMATION`; an item of another category may have no answer.

    Raises:
        DataError: a record that lacks what it needs.
    """
    for _, place, sample in objects(paths, "a sample"):
        name = place.name(sample.get("sample_id"), "sample_id")
        place = Place(place.path)
        draft = Draft(place.at(name), name)
        conversation = draft.place.mapping(sample.get("conversation"), "conversation")
        for session_id, time, turns in sessions(draft.place, conversation):
            draft.session(session_id, iso_time(time, _TIME))
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
        DataError: a session that is no list, a time that is no text, a turn without `dia_id`.
    """
    numbered = sorted((int(match[1]), key) for key in conversation if (match := SESSION.fullmatch(key)))
    for number, key in numbered:
        here = place.at(key)
        turns = []
        for value in place.sequence(conversation[key] or [], key):
            turn = here.mapping(value, "a turn")
            turn_id = here.name(turn.get("dia_id"), "dia_id")
            turns.append((here.at(turn_id), turn_id, turn))
        time = f"{key}_date_time"
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
        draft.question(where, question, resolve(where, item.get("evidence"), draft.turn_ids))


def answers_of(place: Place, item: dict[str, Any]) -> tuple[str, ...]:
    """The gold answer as text (numbers too); empty if the item has none."""
    answer = item.get("answer")
    if answer is None:
        return ()
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    return (str(answer) if number else place.text(answer, "answer"),)


def resolve(place: Place, value: object, turn_ids: Collection[str]) -> Resolved:
    """Resolve an `evidence` field: none, one or a list of texts, or numbers as their digits. Blanks name nothing.

    What is left of a text between its references dangles.

    Args:
        turn_ids: of the dialogue.

    Raises:
        DataError: neither text nor a number.
    """
    # counted, since a hostile file can name the same turns very often
    turns: Counter[str] = Counter()
    dangling: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        whole = isinstance(item, int) and not isinstance(item, bool)
        text = "" if item is None else str(item) if whole else place.text(item, "evidence")
        if text.strip() in turn_ids:
            turns[text.strip()] += 1
            continue
        for match in _REFERENCE.finditer(text):
            name = f"D{int(match[1])}:{int(match[2])}"
            if name in turn_ids:
                turns[name] += 1
            else:
                dangling.append(match[0])
        if rest := " ".join(re.findall(r"\w+", re.sub(r"\band\b", " ", _REFERENCE.sub(" ", text)))):
            dangling.append(rest)
    return Resolved(tuple(turns), tuple(dangling), sum(turns.values()) + len(dangling))


def read_annotations(path: str | Path) -> dict[str, Annotations]:
    """The field `observation` by dialogue: facts that an LLM has written.

    Raises:
        DataError: a file that cannot be read, or a field that is not as in LoCoMo.
    """
    held: dict[str, Annotations] = {}
    for _, place, sample in objects([Path(path)], "a sample"):
        name = place.name(sample.get("sample_id"), "sample_id")
        here = Place(place.path, name)
        talk = sessions(here, here.mapping(sample.get("conversation"), "conversation"))
        turn_ids = {turn for _, _, turns in talk for _, turn, _ in turns}
        facts = held.setdefault(name, {})
        for key, speakers in here.mapping(sample.get("observation", {}), "observation").items():
            told = here.mapping(speakers, "observation").values() if (number := _ABOUT.fullmatch(key)) else ()
            for row in (row for rows in told for row in here.sequence(rows, "observation")):
                match here.sequence(row, "a fact"):
                    case [text, turns] if number:
                        fact = (here.text(text, "a fact"), resolve(here, turns, turn_ids).turn_ids)
                        facts.setdefault(f"S{int(number[1])}", []).append(fact)
                    case parts:
                        raise here.error(f"a fact should be its text and its turns, not {len(parts)} values")
    return held
