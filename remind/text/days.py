"""Days that a text speaks of, by rules."""

from __future__ import annotations

import re
from calendar import day_name, month_name, monthrange
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, timedelta
from typing import NamedTuple

_MONTHS = {
    name[:length].lower(): number for number, name in enumerate(month_name) if number for length in (3, len(name))
}
_MONTHS["sept"] = 9
_WEEKDAYS = {name.lower(): number for number, name in enumerate(day_name)}
_NUMBERS = dict(zip(["one", "two", "three", "four", "five", "six", "seven", "eight"], range(1, 9), strict=True))
_NUMBERS |= {"a": 1, "an": 1, "couple": 2, "few": 3}
_UNITS = "day|week|weekend|month|year"
_MONTH = rf"(?P<month>{'|'.join(sorted(_MONTHS, key=len, reverse=True))})\b\.?"
_YEAR = r"(?:19|20)\d\d"
_DAY = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th)?"
_PATTERN = re.compile(
    rf"""\b(?:
      (?P<iso>{_YEAR}[-/]\d\d?[-/]\d\d?)(?!\d)
    | (?P<dotted>[0-3]?\d\.[01]?\d\.{_YEAR})(?!\d)
    | (?:{_DAY}\s+(?:of\s+)?)?{_MONTH}(?:\s+(?P<after>[0-3]?\d)(?:st|nd|rd|th)?\b(?!:\d))?
      (?:(?:,\s*|\s+|\s+of\s+)(?P<year>{_YEAR})\b)?
    | (?P<alone>(?<![$€£#\d.,:-]){_YEAR})\b(?![%\d]|[.,:-]\d)
    | (?P<word>yesterday|today|tonight|last\s+night)\b
    | (?P<count>\d{{1,4}}|{"|".join(_NUMBERS)})\s+(?:of\s+)?(?P<unit>{_UNITS})s?\s+(?:ago|earlier)\b
    | (?P<which>last|past|previous|this|next)\s+(?P<of>{_UNITS}|{"|".join(_WEEKDAYS)})\b
    )""",
    re.VERBOSE | re.IGNORECASE,
)
#: Months that are words or names of people too, as are the short forms; after one of these words they are months.
_AMBIGUOUS = (3, 4, 5, 6, 8)
_LEADS = re.compile(
    r"\b(?:in|on|of|by|since|until|till|before|after|during|early|mid|late|last|this|next|from|to|and|or|between|for|"
    r"through|throughout|around)[\s-]+(?:the\s+)?\Z",
    re.IGNORECASE,
)
#: After one of these a question is about what lies beside the days it names.
_BESIDE = re.compile(r"\b(?:before|after|since|until|till)\s+(?:the\s+)?\Z", re.IGNORECASE)


class Span(NamedTuple):
    """First and last day."""

    start: date
    end: date


def spans(text: str, said: date | None, latest: date | None = None) -> Iterator[Span]:
    """The days a text names, in its order; what names no day that exists is passed over.

    Weeks begin on Monday. A month or day without a year is the last one that has begun by `said`.

    Args:
        said: the day of the text; None: "last week" and the like name nothing.
        latest: the last day it can be about, for months without a year; None: `said`.
    """
    return (span for _, span in _found(text, said, latest))


def time_range(text: str, asked: date | None, latest: date | None = None) -> Span | None:
    """The days from the first to the last that a question names; None: it names none, or asks what was before or after.

    Args:
        asked: the day of the question; None: unknown, and "last week" and the like name nothing.
        latest: the last day the question can be about, for months without a year.
    """
    found = list(_found(text, asked, latest))
    beside = any(_BESIDE.search(text[:at]) for at, _ in found)
    if beside or not found:
        return None
    days = [span for _, span in found]
    return checked(Span(min(one.start for one in days), max(one.end for one in days)), asked)


def checked(span: Span, asked: date | None) -> Span | None:
    """The range; None where it ends before it begins, or begins on the day of the question as in LongMemEval's code."""
    return None if span.start > span.end or span.start == asked else span


def day_of(time: str | None) -> date | None:
    """The day of a time as `Turn` has it; None where it is in words, or no such day."""
    if time is not None:
        with suppress(ValueError):
            return date.fromisoformat(time[:10])
    return None


def _found(text: str, said: date | None, latest: date | None) -> Iterator[tuple[int, Span]]:
    """Where each expression begins, and its days."""
    for match in _PATTERN.finditer(text):
        # a day such as 31 February, or one before the year 1
        with suppress(ValueError, OverflowError):
            if (span := _read(match, said, latest or said)) is not None:
                yield match.start(), span


def _read(match: re.Match[str], said: date | None, latest: date | None) -> Span | None:
    part = match.groupdict()
    if part["iso"]:
        return one_day(date(*map(int, re.split("[-/]", part["iso"]))))
    if part["dotted"]:
        return one_day(date(*map(int, reversed(part["dotted"].split(".")))))
    if part["alone"]:
        return Span(date(int(part["alone"]), 1, 1), date(int(part["alone"]), 12, 31))
    if part["month"]:
        return _month(match, latest)
    if said is None:
        return None
    if part["word"]:
        return one_day(said - timedelta(days=part["word"].lower().startswith(("yesterday", "last"))))
    if part["count"]:
        count = int(part["count"]) if part["count"].isdigit() else _NUMBERS[part["count"].lower()]
        return _around(part["unit"].lower(), said, -count)
    steps = {"this": 0, "next": 1}.get(part["which"].lower(), -1)
    return _around(part["of"].lower(), said, steps)


def _month(match: re.Match[str], latest: date | None) -> Span | None:
    number = _MONTHS[match["month"].lower()]
    day = match["day"] or match["after"]
    alone = day is None and match["year"] is None
    unsure = alone and (number in _AMBIGUOUS or len(match["month"]) < 5)
    if unsure and not _LEADS.search(match.string[: match.start()]):
        return None
    first = int(day) if day else 1
    if match["year"]:
        year = int(match["year"])
    elif latest is not None:
        year = latest.year - ((number, first) > (latest.month, latest.day))
    else:
        return None
    start = date(year, number, first)
    return one_day(start) if day else Span(start, date(year, number, monthrange(year, number)[1]))


def _around(unit: str, said: date, steps: int) -> Span:
    """The week, month, ... so many steps from that of the day; a count of days or weeks ends on a single day."""
    if unit in _WEEKDAYS:
        # last Monday is before today, next Monday after it
        away = (_WEEKDAYS[unit] - said.weekday()) % 7
        return one_day(said + timedelta(days=away + 7 * (steps if steps < 0 else steps and not away)))
    if unit == "day":
        return one_day(said + timedelta(days=steps))
    if unit == "year":
        return Span(date(said.year + steps, 1, 1), date(said.year + steps, 12, 31))
    if unit == "month":
        year, month = divmod(12 * said.year + said.month - 1 + steps, 12)
        return Span(date(year, month + 1, 1), date(year, month + 1, monthrange(year, month + 1)[1]))
    monday = said + timedelta(days=7 * steps - said.weekday())
    return Span(monday + timedelta(days=5 if unit == "weekend" else 0), monday + timedelta(days=6))


def one_day(day: date) -> Span:
    """A day alone."""
    return Span(day, day)
