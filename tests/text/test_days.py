"""Days that texts name, against a calendar."""

from __future__ import annotations

from calendar import month_name
from collections.abc import Callable
from datetime import date, timedelta

import pytest

from remind.text.days import Span, spans, time_range

TODAY = date(2024, 3, 14)  # a Thursday
#: Every day near enough to be meant.
CALENDAR = [date(2020, 1, 1) + timedelta(days=n) for n in range(6 * 366)]


def among(belongs: Callable[[date], bool]) -> Span:
    """First and last of the days of the calendar for which it holds, all days between them included."""
    days = [day for day in CALENDAR if belongs(day)]
    assert len(days) == (days[-1] - days[0]).days + 1
    return Span(days[0], days[-1])


@pytest.mark.parametrize("number", range(1, 13))
def test_named_months_are_their_days_in_the_calendar(number: int) -> None:
    name = month_name[number]
    for year in (2020, 2023, 2024):
        expected = among(lambda day, year=year: (day.year, day.month) == (year, number))
        for text in (f"What did Ana do in {name} {year}?", f"{name}, {year}", f"{name[:3]}. of {year}".lower()):
            assert list(spans(text, None)) == [expected]
    # without a year: the last one that has begun
    begun = [day for day in CALENDAR if day <= TODAY and day.month == number]
    year = begun[-1].year
    expected = among(lambda day: (day.year, day.month) == (year, number))
    assert time_range(f"What happened in {name}?", None, TODAY) == expected


@pytest.mark.parametrize("today", [TODAY, date(2024, 1, 1), date(2023, 12, 31), date(2024, 2, 29)])
def test_relative_expressions_are_days_of_the_calendar(today: date) -> None:
    def week(day: date) -> tuple[int, int]:
        return day.isocalendar()[:2]

    month_ago = today.replace(day=1) - timedelta(days=1)
    expected = {
        "last week": among(lambda day: week(day) == week(today - timedelta(days=7))),
        "2 weeks ago": among(lambda day: week(day) == week(today - timedelta(days=14))),
        "next week": among(lambda day: week(day) == week(today + timedelta(days=7))),
        "last weekend": among(lambda day: week(day) == week(today - timedelta(days=7)) and day.isoweekday() > 5),
        "last month": among(lambda day: (day.year, day.month) == (month_ago.year, month_ago.month)),
        "this month": among(lambda day: (day.year, day.month) == (today.year, today.month)),
        "a year ago": among(lambda day: day.year == today.year - 1),
        "yesterday": among(lambda day: day == today - timedelta(days=1)),
        "three days ago": among(lambda day: day == today - timedelta(days=3)),
        "in 2021": among(lambda day: day.year == 2021),
        "on 29 February 2024": among(lambda day: day == date(2024, 2, 29)),
        "May 3rd, 2022": among(lambda day: day == date(2022, 5, 3)),
        "2022/5/3": among(lambda day: day == date(2022, 5, 3)),
    }
    for text, span in expected.items():
        assert list(spans(f"We met {text}, I think", today)) == [span], text
    for name in ("Monday", "Thursday", "Sunday"):
        before = [day for day in CALENDAR if day < today and f"{day:%A}" == name]
        after = [day for day in CALENDAR if day > today and f"{day:%A}" == name]
        assert list(spans(f"last {name} and next {name}", today)) == [Span(d, d) for d in (before[-1], after[0])]


def test_the_range_of_a_question() -> None:
    whole = Span(date(2023, 5, 1), date(2023, 7, 31))
    assert time_range("What came between May and July 2023?", None, date(2023, 12, 1)) == whole
    for beside in ("before May 2023", "since 2022", "after the 3 May 2023"):
        assert time_range(f"What happened {beside}?", None, TODAY) is None
    # begins on the day of the question
    assert time_range("What did I say today?", TODAY) is None
    assert time_range("What did I say yesterday?", TODAY) is not None
