"""A file of which only a part is held in memory, and JSON values read from it one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from remind.core.errors import DataError
from remind.core.files import DuplicateKeyError, unique_keys
from sae.regular import check_regular

#: Characters read at a time; more for a value that does not fit.
CHUNK = 1 << 20
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_SPACE = re.compile(r"[ \t\n\r]*")
_REST_OF_LINE = re.compile(r"[ \t\r]*(\n|\Z)")
#: Longer than any literal or escape: an error further from the end is one whatever follows.
_MARGIN = 16


class Window:
    """A file from `position` on; the text before it is dropped.

    Attributes:
        text: the part held.
        position: where reading goes on in `text`.

    Raises:
        DataError: not a regular file, not readable, or not UTF-8 (with byte and line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        self._line = 1
        check_regular(path, DataError)
        try:
            self._file = path.open(encoding="utf-8-sig", newline="\n")
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path) from None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def more(self, times: int = 1) -> bool:
        """Read another chunk, or `times` the text held from `position` on if that is longer. False at the end."""
        rest = self.text[self.position :]
        block = self._read(self._file.read, max(CHUNK, times * len(rest)))
        if block:
            self._line = self.line(self.position)
            self.text, self.position = rest + block, 0
        return bool(block)

    def _read(self, read: Callable[[int], str], size: int) -> str:
        try:
            return read(size)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", self.path) from None
        except UnicodeDecodeError:
            raise self._not_utf8() from None

    def _not_utf8(self) -> DataError:
        before = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    what = f"not UTF-8 (byte {before + error.start}); convert the file"
                    return DataError(what, self.path, f"line {number}")
                before += len(line)
        return DataError("not UTF-8; convert the file", self.path)

    def line(self, position: int | None = None) -> int:
        """Number, from 1, of the line of `position` (or of another place in `text`)."""
        return self._line + self.text.count("\n", 0, self.position if position is None else position)

    def skip(self) -> str:
        """Pass over white space. The character after it, "" at the end."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.more():
                return ""

    def ends_line(self) -> bool:
        """Whether nothing but white space follows on this line."""
        while (match := _REST_OF_LINE.match(self.text, self.position)) and not match[1] and self.more():
            pass
        return match is not None

    def value(self) -> Any:
        """The JSON value at `position`. Raises DataError with the line if it is none or an object has a key twice."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                # an unclosed string may go on in the next chunk
                final = error.pos < len(self.text) - _MARGIN and not error.msg.startswith("Unterminated string")
                # decoding starts again each time, so it should be rare for a long value
                if final or not self.more(3):
                    raise _json_error(error, self.path, self.line(error.pos)) from None
            except (ValueError, RecursionError) as error:
                raise _json_error(error, self.path, self.line()) from None
            else:
                # a number may go on
                if isinstance(value, str | dict | list) or end < len(self.text) - _MARGIN or not self.more():
                    self.position = end
                    return value

    def error(self, message: str) -> DataError:
        return DataError(f"not JSON: {message}", self.path, f"line {self.line()}")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line from here on, without its line end (\\n alone ends lines)."""
        number = self.line()
        *lines, last = self.text[self.position :].split("\n")
        for line in lines:
            yield number, line
            number += 1
        while line := last + self._read(self._file.readline, -1):
            yield number, line.removesuffix("\n")
            number += 1
            last = ""


def parse_line(path: Path, number: int, line: str) -> Any:
    """The JSON value that a line is. Raises DataError with its number."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise _json_error(error, path, number) from None


def _json_error(error: ValueError | RecursionError, path: Path, line: int) -> DataError:
    if isinstance(error, RecursionError):
        message = "nested too deeply"
    elif isinstance(error, DuplicateKeyError):
        message = str(error)
    else:
        message = f"not JSON: {getattr(error, 'msg', error)}"
    return DataError(message, path, f"line {line}")
