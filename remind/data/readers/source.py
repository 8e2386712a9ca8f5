"""A data file as its readers see it: records with a place each, so that every error names file and record."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from remind.core.errors import DataError, named, shown
from remind.data.readers.window import Window, parse_line

__all__ = ["Place", "Record", "Source", "natural", "shown"]

#: The beginning of a time in ISO 8601.
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A file and a record in it ("line 12", "conv-26, D1:3"), with the checks of values that every reader shares."""

    path: Path
    record: str | None = None

    def at(self, record: str) -> Place:
        record = named(record)
        return Place(self.path, record if self.record is None else f"{self.record}, {record}")

    def error(self, message: str) -> DataError:
        return DataError(message, self.path, self.record)

    def __str__(self) -> str:
        return self.path.name if self.record is None else f"{self.path.name} [{self.record}]"

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{what} should be an object, not {_kind(value)}")
        return value

    def sequence(self, value: object, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(f"{what} should be a list, not {_kind(value)}")
        return value

    def text(self, value: object, what: str) -> str:
        """A string, possibly empty."""
        if not isinstance(value, str):
            raise self.error(f"{what} should be text, not {_kind(value)}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise self.error(f"{what} holds half a character (a lone surrogate at {error.start})") from None
        return value

    def optional_text(self, value: object, what: str) -> str | None:
        return None if value is None else self.text(value, what)

    def time(self, value: object, what: str) -> str | None:
        """A time as `Turn` has it: ISO 8601 or words. NaN and NaT, which tables hold where there is none, are None."""
        text = self.optional_text(value, what)
        if text is None or text.strip().lower() in ("nan", "nat"):
            return None
        if match := _DATE.match(text.strip()):
            try:
                datetime.fromisoformat(match[0])
            except ValueError:
                raise self.error(f"{what} {shown(text)} is not a valid date or time of day") from None
        return text

    def name(self, value: object, what: str) -> str:
        """A string that is not blank; whole numbers are taken as their digits."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is None or not (text := self.text(value, what)).strip():
            raise self.error(f"{what} is missing or blank")
        return text


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    return {dict: "an object", list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which numbers in names count as numbers."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts]


class Record(NamedTuple):
    place: Place
    value: Any


class Source:
    """One file, read record by record: no more of it is held than the longest record and the next few.

    Raises:
        DataError: not a regular file, not readable, empty, not UTF-8, or not JSON or CSV (with the line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = Place(path)

    @cached_property
    def is_json(self) -> bool:
        with Window(self.path) as window:
            start = window.skip()
        if not start:
            raise DataError("the file is empty", self.path)
        return start in "{["

    @property
    def records(self) -> Iterator[Record]:
        """Records from the first one on: lines of JSON Lines, elements of a JSON list, or the one JSON object.

        A single object in a `.jsonl` file is a line.
        """
        with Window(self.path) as window:
            start = window.skip()
            if not start:
                raise DataError("the file is empty", self.path)
            yield from self._items(window) if start == "[" else self._objects(window)

    @property
    def any_records(self) -> Iterator[Record]:
        """As `records`; none for an empty file."""
        with Window(self.path) as window:
            empty = not window.skip()
        if not empty:
            yield from self.records

    def _items(self, window: Window) -> Iterator[Record]:
        window.position += 1
        number = 0
        closed = window.skip() == "]"
        while not closed:
            number += 1
            yield Record(self.place.at(f"item {number}"), window.value())
            mark = window.skip()
            if mark not in (",", "]"):
                raise window.error("Expecting ',' delimiter")
            closed = mark == "]"
            if not closed:
                window.position += 1
                window.skip()
        window.position += 1
        if window.skip():
            raise window.error("Extra data")
        if not number:
            raise DataError("the file holds no records", self.path)

    def _objects(self, window: Window) -> Iterator[Record]:
        line = window.line()
        value = window.value()
        is_line = isinstance(value, dict) and window.line() == line and window.ends_line()
        if not window.skip():
            # JSON Lines of a single line if the name says so; any other object is the file itself
            is_line = is_line and self.path.suffix.lower() == ".jsonl"
            yield Record(self.place.at(f"line {line}") if is_line else self.place, value)
            return
        if not is_line:
            raise window.error("Extra data")
        yield Record(self.place.at(f"line {line}"), value)
        del value
        for number, text in window.lines():
            if text.strip():
                yield Record(self.place.at(f"line {number}"), parse_line(self.path, number, text))

    @cached_property
    def first(self) -> dict[str, Any]:
        """The first record if it is an object, else an empty one; empty for files that are not JSON."""
        value = next(self.records).value if self.is_json else None
        return value if isinstance(value, dict) else {}

    @cached_property
    def columns(self) -> list[str]:
        """The header of a CSV file; empty for JSON."""
        if self.is_json:
            return []
        with Window(self.path) as window:
            try:
                return next(csv.reader(line for _, line in window.lines()), [])
            except csv.Error:
                return []

    def rows(self) -> Iterator[Record]:
        """The rows of a CSV file as objects by column.

        Raises:
            DataError: a row with too few or too many columns, or two columns of one name.
        """
        if repeated := [name for name in self.columns if self.columns.count(name) > 1]:
            raise self.place.error(f"the column {shown(repeated[0])} occurs twice in the header")
        with Window(self.path) as window:
            reader = csv.DictReader((f"{line}\n" for _, line in window.lines()), strict=True)
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise DataError(f"not CSV: {error}", self.path, f"line {reader.reader.line_num}") from None
                place = self.place.at(f"line {reader.line_num}")
                if None in row or None in row.values():
                    raise place.error(f"the row should have {len(self.columns)} columns")
                yield Record(place, row)
