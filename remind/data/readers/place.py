"""Where something stands in a data file, and the checks of values that every reader shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import DataError, named, shown

__all__ = ["Place", "shown"]


@dataclass(frozen=True, slots=True)
class Place:
    """A file and a record in it ("line 12", "conv-26, D1:3"): what an error points at."""

    path: Path
    record: str | None = None

    def at(self, record: str) -> Place:
        record = named(record)
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
            # errors hold single spaces alone
            message = str(error).removeprefix(" ".join(f"[{error.record}]: ".split()) + " ")
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
