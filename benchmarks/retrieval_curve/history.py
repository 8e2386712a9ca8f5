"""Long histories for measurements: one dialogue with its questions among changed copies of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from random import Random

from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.perception.segment import turn_text

#: Chance of a word of a copy to be dropped, and to change places with the next.
DROPPED = 0.1
SWAPPED = 0.1
_DAYS = 3650


@dataclass(frozen=True)
class History:
    """A long dialogue and where its turns come from.

    Attributes:
        dialogue: the base, whose turns keep their ids, in the midst of copies of others.
        sources: text of each copied turn, as retrieval reads it, to the same before words were dropped and swapped.
    """

    dialogue: Dialogue
    sources: dict[str, str]


def make_history(
    base: Dialogue, others: Sequence[Dialogue], tokens: int, count: Callable[[Sequence[str]], list[int]], seed: int
) -> History:
    """The base whole, and of the others so many copies, session by session, that it comes to about `tokens` tokens.

    In every copy the speakers have the base's names, dates are shifted, words are dropped and neighbours swapped; in no
    two copies alike.

    Args:
        count: tokens of each text.
    """
    held = sum(count([turn_text(turn) for turn in base.turns]))
    before: list[Session] = []
    after: list[Session] = []
    sources: dict[str, str] = {}
    number = 0
    while held < tokens and others:
        copied = others[number % len(others)]
        random = Random(f"{seed} {number} {copied.id}")
        target = before if number % 2 else after
        plain = [_renamed(session, copied, base) for session in copied.sessions]
        changed = [_changed(session, number, random) for session in plain]
        lengths = count([turn_text(turn) for session in changed for turn in session.turns])
        for source, session in zip(plain, changed, strict=True):
            if held >= tokens:
                break
            held += sum(lengths[: len(session.turns)])
            del lengths[: len(session.turns)]
            target.append(session)
            pairs = zip(session.turns, source.turns, strict=True)
            sources |= {turn_text(turn): turn_text(original) for turn, original in pairs}
        number += 1
    dialogue = Dialogue(f"{base.id}-{tokens}", tuple(_numbered([*before, *base.sessions, *after])))
    return History(dialogue, sources)


def asked_of(history: Dialogue, base: Dialogue, questions: Sequence[Question]) -> list[Question]:
    """The base's questions with gold evidence turns, asked of the history."""
    of_base = [q for q in questions if q.dialogue_id == base.id and q.evidence]
    return [replace(question, dialogue_id=history.id, images=()) for question in of_base]


def _renamed(session: Session, dialogue: Dialogue, base: Dialogue) -> Session:
    """With the base's speakers instead of the dialogue's, in what they say too."""
    names = {old: base.speakers[place % len(base.speakers)] for place, old in enumerate(dialogue.speakers)}
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b", re.IGNORECASE)
    known = {old.casefold(): new for old, new in names.items()}

    def renamed(turn: Turn) -> Turn:
        text = pattern.sub(lambda match: known[match.group().casefold()], turn.text)
        return replace(turn, speaker=names[turn.speaker], text=text)

    return replace(session, turns=tuple(map(renamed, session.turns)))


def _changed(session: Session, number: int, random: Random) -> Session:
    days = random.randrange(-_DAYS, _DAYS)
    turns = tuple(
        replace(turn, id=f"{number}/{turn.id}", text=_worn(turn.text, random), time=_shifted(turn.time, days))
        for turn in session.turns
    )
    return Session(f"{number}/{session.id}", _shifted(session.time, days), turns)


def _worn(text: str, random: Random) -> str:
    words = [word for word in text.split() if random.random() >= DROPPED] or text.split()
    for place in range(len(words) - 1):
        if random.random() < SWAPPED:
            words[place], words[place + 1] = words[place + 1], words[place]
    return " ".join(words)


def _shifted(time: str | None, days: int) -> str | None:
    try:
        return None if time is None else (datetime.fromisoformat(time) + timedelta(days=days)).isoformat()
    except ValueError:
        return time


def _numbered(sessions: Sequence[Session]) -> list[Session]:
    """With images counted anew; their files are left out."""
    made, images = [], 0
    for session in sessions:
        turns = []
        for turn in session.turns:
            shown = tuple(
                replace(image, index=images + place, path=None, source=None) for place, image in enumerate(turn.images)
            )
            images += len(shown)
            turns.append(replace(turn, images=shown))
        made.append(replace(session, turns=tuple(turns)))
    return made
