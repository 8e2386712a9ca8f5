"""A data file as its readers see it: records with a place each, so that every error names file and record."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from remind.errors import DataError


@dataclass(frozen=True, slots=True)
class Place:
    """A file and a record in it ("line 12", "conv-26, D1:3"): what an error points at."""

    path: Path
    record: str | None = None

    def at(self, record: str) -> Place:
        return Place(self.path, record if self.record is None else f"{self.record}, {record}")

    def error(self, message: str) -> DataError:
        return DataError(message, self.path, self.record)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Give DataErrors that name no file this place."""
        try:
            yield
        except DataError as error:
            if error.path is not None:
                raise
            message = str(error).removeprefix(f"[{error.record}]: ")
            raise type(error)(message, self.path, self.record or error.record) from None

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


class Record(NamedTuple):
    place: Place
    value: Any


class Source:
    """One file, parsed at most once.

    Raises:
        DataError: not readable, empty, not UTF-8, or not JSON or CSV (with the line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = Place(path)

    @cached_property
    def text(self) -> str:
        try:
            text = self.path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise DataError(f"not UTF-8 (byte {error.start}); convert the file", self.path, f"line {line}") from None
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", self.path) from None
        if not text.strip():
            raise DataError("the file is empty", self.path)
        return text

    @property
    def is_json(self) -> bool:
        return self.text.lstrip()[0] in "{["

    @cached_property
    def records(self) -> list[Record]:
        """JSON Lines give one record a line, a JSON list one an element, a JSON object one."""
        lines = [(number, line) for number, line in enumerate(self.text.split("\n"), start=1) if line.strip()]
        if len(lines) > 1 and _is_object(lines[0][1]):
            return [
                Record(self.place.at(f"line {number}"), self._parse(line, f"line {number}")) for number, line in lines
            ]
        value = self._parse(self.text)
        if not isinstance(value, list):
            return [Record(self.place, value)]
        if not value:
            raise DataError("the file holds no records", self.path)
        return [Record(self.place.at(f"item {number}"), item) for number, item in enumerate(value, start=1)]

    def _parse(self, text: str, record: str | None = None) -> Any:
        try:
            return json.loads(text)
        except RecursionError:
            raise DataError("nested too deeply", self.path, record) from None
        except ValueError as error:
            if record is None and isinstance(error, json.JSONDecodeError):
                record = f"line {error.lineno}"
            raise DataError(f"not JSON: {getattr(error, 'msg', error)}", self.path, record) from None

    @property
    def first(self) -> dict[str, Any]:
        """The first record if it is an object, else an empty one; empty for files that are not JSON."""
        value = self.records[0].value if self.is_json else None
        return value if isinstance(value, dict) else {}

    @cached_property
    def columns(self) -> list[str]:
        """The header of a CSV file; empty for JSON."""
        if self.is_json:
            return []
        try:
            return next(csv.reader(io.StringIO(self.text, newline="")), [])
        except csv.Error:
            return []

    def rows(self) -> Iterator[Record]:
        """The rows of a CSV file as objects by column. Raises DataError for a row that lacks or exceeds the columns."""
        reader = csv.DictReader(io.StringIO(self.text, newline=""), strict=True)
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


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
