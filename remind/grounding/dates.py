"""Dates a question names, and how close a turn's day is to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import torch
from torch import Tensor

from remind.data.dialogue import Dialogue

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
class AskedDate:
    """A date as far as the question says: `year` and `day` may be missing."""

    month: int
    year: int | None = None
    day: int | None = None


def asked_dates(text: str) -> tuple[AskedDate, ...]:
    """Dates the text names, in the order of the forms above; days stand before months in numbers (31.12.2023)."""
    found: list[AskedDate] = []
    rest = text
    for form in _FORMS:
        for match in form.finditer(rest):
            parts = match.groupdict()
            month = _NUMBER.get(parts["month"].lower()) or int(parts["month"]) if parts["month"] else 0
            year = int(parts["year"]) if parts.get("year") else None
            day = int(parts["day"]) if parts.get("day") else None
            if 1 <= month <= 12 and (day is None or 1 <= day <= 31):
                found.append(AskedDate(month, year + 2000 if year is not None and year < 100 else year, day))
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


def closeness(days: Sequence[date | None], asked: Sequence[AskedDate]) -> Tensor:
    """For each day 1 if it is an asked one or falls in an asked month, 0.5 within `NEAR` days of it, else 0; [n]."""
    return torch.tensor([max((_close(day, wanted) for wanted in asked), default=0.0) if day else 0.0 for day in days])


def _close(day: date, wanted: AskedDate) -> float:
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
