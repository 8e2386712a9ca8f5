"""What retrieval knows of each turn, question by question, for `fusion`: cosines, BM25, and facts such as dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue
from remind.perception.index import BM25
from remind.states.pyramid import turn_text
from remind.text.strategy import target_speakers
from remind.text.words import stems, word_list, words

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


@cache
def empty_words() -> frozenset[str]:
    """Function words and words that only make a question."""
    return word_list("stopwords") | word_list("question")


def name_words(dialogue: Dialogue) -> frozenset[str]:
    """Words of the speakers' names. Every line begins with one, so they do not distinguish turns."""
    parts = {part for speaker in dialogue.speakers for part in words(speaker)}
    return frozenset(parts | {part + "s" for part in parts})


def without_names(text: str, names: frozenset[str]) -> str:
    """The text less the words that are a speaker's name; the text itself where nothing else is left."""
    kept = [word for word in text.split() if re.sub(r"(?:['’]s)?\W*$", "", word.lower()) not in names]
    return " ".join(kept) or text


class TurnIndex:
    """A dialogue as retrieval reads it, made once for all its questions.

    Args:
        dialogue: n turns.
        encoder: gives the vectors of turns and questions.
    """

    def __init__(self, dialogue: Dialogue, encoder: SentenceEncoder) -> None:
        self.dialogue, self.encoder = dialogue, encoder
        self.names = name_words(dialogue)
        self.skipped = empty_words() | self.names
        texts = [turn_text(turn) for turn in dialogue.turns]
        sessions = [number for number, session in enumerate(dialogue.sessions) for _ in session.turns]
        self.vectors = encoder.encode(texts)
        self.stems = BM25([stems(text, self.skipped) for text in texts])
        self.asks = torch.tensor([float("?" in turn.text) for turn in dialogue.turns])
        follows = torch.tensor([n > 0 and sessions[n] == sessions[n - 1] for n in range(len(texts))])
        self.answers = torch.where(follows, self.asks.roll(1), 0.0)
        self.dates = turn_dates(dialogue)

    def signals(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """Scores of every turn for each question, float32 [n, len(questions)].

        dense: cosine of the turn (its line and captions) and the question less speakers' names. bm25: over stems,
        without names, function and question words.
        speaker: 1 where the turn's speaker is named. date: see `closeness`. asks: 1 for a turn with a question mark,
        answers: for the one after it.
        """
        if not questions:
            raise ConfigError("no questions to score turns for")
        asked = self.encoder.encode([without_names(question, self.names) for question in questions]).T
        n, ones = len(self.dialogue.turns), torch.ones(1, len(questions))
        return {
            "dense": self.vectors @ asked,
            "bm25": _columns([self.stems.scores(stems(question, self.skipped)) for question in questions]),
            "speaker": self._named(questions),
            "date": torch.stack([closeness(self.dates, named_dates(question)) for question in questions], 1),
            "asks": self.asks.reshape(n, 1) * ones,
            "answers": self.answers.reshape(n, 1) * ones,
        }

    def _named(self, questions: Sequence[str]) -> Tensor:
        columns = []
        for question in questions:
            named = set(target_speakers(self.dialogue, question))
            columns.append(torch.tensor([float(turn.speaker in named) for turn in self.dialogue.turns]))
        return torch.stack(columns, 1)


def _columns(scores: Sequence[object]) -> Tensor:
    return torch.stack([torch.as_tensor(column, dtype=torch.float32) for column in scores], 1)


_MONTHS = "january february march april may june july august september october november december"
_NUMBER = {name: number for number, month in enumerate(_MONTHS.split(), 1) for name in (month, month[:3])}
_MONTH = rf"(?P<month>{'|'.join(sorted(_NUMBER, key=len, reverse=True))})"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_ISO = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_FORMS = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        rf"\b{_YEAR}[-/](?P<month>\d{{1,2}})[-/](?P<day>\d{{1,2}})\b",
        r"\b(?P<day>\d{1,2})[./](?P<month>\d{1,2})[./](?P<year>\d{4}|\d{2})\b",
        rf"\b{_DAY}(?: of)? {_MONTH}\b(?:,? {_YEAR})?",
        rf"\b{_MONTH} {_DAY}(?!\d)(?:,? {_YEAR})?",
        rf"\b{_MONTH},? {_YEAR}\b",
        # alone, march and may are words before they are months
        rf"\b(?:in|during|since|until|of) {_MONTH}\b",
    )
)
#: Days from a named day at which a turn still counts by half: what is told the day after, and time zones.
NEAR = 2


@dataclass(frozen=True, slots=True)
class NamedDate:
    """A date as far as the question says: `year` and `day` may be missing."""

    month: int
    year: int | None = None
    day: int | None = None


def named_dates(text: str) -> tuple[NamedDate, ...]:
    """Dates the text names, in the order of the forms above; days come before months in numbers (31.12.2023)."""
    found: list[NamedDate] = []
    rest = text
    for form in _FORMS:
        for match in form.finditer(rest):
            parts = match.groupdict()
            month = _NUMBER.get(parts["month"].lower()) or int(parts["month"]) if parts["month"] else 0
            year = int(parts["year"]) if parts.get("year") else None
            day = int(parts["day"]) if parts.get("day") else None
            if 1 <= month <= 12 and (day is None or 1 <= day <= 31):
                found.append(NamedDate(month, year + 2000 if year is not None and year < 100 else year, day))
        rest = form.sub(" ; ", rest)
    return tuple(dict.fromkeys(found))


def turn_dates(dialogue: Dialogue) -> tuple[date | None, ...]:
    """The day of every turn: its own, else its session's; None where neither is ISO 8601."""
    days = []
    for session in dialogue.sessions:
        for turn in session.turns:
            match = _ISO.match(turn.time or "") or _ISO.match(session.time or "")
            try:
                days.append(date(*map(int, match.groups())) if match else None)
            except ValueError:
                days.append(None)
    return tuple(days)


def closeness(days: Sequence[date | None], asked: Sequence[NamedDate]) -> Tensor:
    """For each day 1 if it is an asked one or falls in an asked month, 0.5 within `NEAR` days of it, else 0; [n]."""
    return torch.tensor([max((_close(day, wanted) for wanted in asked), default=0.0) if day else 0.0 for day in days])


def _close(day: date, wanted: NamedDate) -> float:
    if wanted.day is None:
        return float(day.month == wanted.month and wanted.year in (None, day.year))
    years = (wanted.year,) if wanted.year is not None else (day.year - 1, day.year, day.year + 1)
    away = []
    for year in years:
        try:
            away.append(abs((date(year, wanted.month, wanted.day) - day).days))
        except ValueError:
            continue
    nearest = min(away, default=NEAR + 1)
    return 1.0 if nearest == 0 else 0.5 if nearest <= NEAR else 0.0
