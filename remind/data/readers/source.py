"""A data file as its readers see it: records with a place each, so that every error names file and record."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from remind.core.errors import DataError
from remind.data.readers.place import Place, shown
from remind.data.readers.window import Window, parse_line

__all__ = ["Place", "Record", "Source", "shown"]


class Record(NamedTuple):
    place: Place
    value: Any


class Source:
    """One file, read record by record: never more of it is held than the longest record and the next few.

    Raises:
        DataError: not a regular file, not readable, empty, not UTF-8, or not JSON or CSV (with the line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = Place(path)
        #: Where the one object of the file stands, once that is known.
        self._sole: Place | None = None

    @cached_property
    def is_json(self) -> bool:
        with Window(self.path) as window:
            while not (start := window.text.lstrip()[:1]):
                window.position = len(window.text)
                if not window.more():
                    raise DataError("the file is empty", self.path)
        return start in "{["

    @property
    def records(self) -> Iterator[Record]:
        """From the first one on, each time anew.

        JSON Lines give one record a line, a JSON list one an element, a JSON object one. An object alone in its file is
        a line where the file is called `.jsonl`, and is not read again once `first` holds it.
        """
        if self.is_sole and self._sole is not None:
            yield Record(self._sole, self.first)
            return
        with Window(self.path) as window:
            start = window.skip()
            if not start:
                raise DataError("the file is empty", self.path)
            yield from self._items(window) if start == "[" else self._objects(window)

    @property
    def any_records(self) -> Iterator[Record]:
        """As `records`; none of an empty file."""
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
        window.finish()
        if not number:
            raise DataError("the file holds no records", self.path)

    def _objects(self, window: Window) -> Iterator[Record]:
        line = window.line()
        value = window.value()
        is_line = isinstance(value, dict) and window.line() == line and window.ends_line()
        if not window.skip():
            # JSON Lines of a single line, where the name says so; any other object is the file itself
            named = is_line and self.path.suffix.lower() == ".jsonl"
            place = self.place.at(f"line {line}") if named else self.place
            self._sole = place if isinstance(value, dict) else None
            yield Record(place, value)
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

    @property
    def is_sole(self) -> bool:
        """Whether `first` was asked for, and is all there is."""
        return self._sole is not None and "first" in self.__dict__

    @cached_property
    def columns(self) -> list[str]:
        """The header of a CSV file; empty for JSON."""
        if self.is_json:
            return []
        with Window(self.path) as window:
            try:
                return next(csv.reader(_csv_lines(window)), [])
            except csv.Error:
                return []

    def rows(self) -> Iterator[Record]:
        """The rows of a CSV file as objects by column, each time anew.

        Raises:
            DataError: a row that lacks or exceeds the columns, or two columns of one name.
        """
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise self.place.error(f"the column {shown(twice[0])} stands twice in the header")
        with Window(self.path) as window:
            reader = csv.DictReader(_csv_lines(window), strict=True)
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


def _csv_lines(window: Window) -> Iterator[str]:
    """Lines as the csv module wants them: any line end counts, and is kept."""
    for _, line in window.lines():
        yield from io.StringIO(line + "\n", newline="")
