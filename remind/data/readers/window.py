"""A file of which only a part is held in memory, and JSON values read from it one by one."""

from __future__ import annotations

import codecs
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from remind.core.errors import DataError
from remind.core.files import DuplicateKeyError, unique_keys

#: Bytes read at a time; more for a value that does not fit.
CHUNK = 1 << 20
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_SPACE = re.compile(r"[ \t\n\r]*")
_REST_OF_LINE = re.compile(r"[ \t\r]*(\n|\Z)")
_LONG_NUMBER = re.compile(r"(?<!\d)\d{4301}\d*+(?!\Z|[.eE])", re.ASCII)
#: Longer than any literal or escape: an error further from the end is one whatever follows.
_MARGIN = 16


class Window:
    """A file from `position` on; the text before it is dropped.

    Attributes:
        text: the part held.
        position: where reading goes on in `text`.

    Raises:
        DataError: not a regular file, not readable, or not UTF-8 (with byte and line, once the text before it is read).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        self._line = 1
        self._bytes = 0
        self._begun = False
        self._bad: int | None = None
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise DataError("not a regular file; copy what it gives into one", path)
            self._file = path.open("rb")
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path) from None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def more(self, times: int = 1) -> bool:
        """Read another chunk, or `times` the text held from `position` on if that is longer. False at the end."""
        if self._bad is not None:
            line = self.line(len(self.text))
            raise DataError(f"not UTF-8 (byte {self._bad}); convert the file", self.path, f"line {line}")
        if self._ended:
            return False
        self._line = self.line(self.position)
        rest = self.text[self.position :]
        self.text, self.position = "", 0
        try:
            block = self._file.read(CHUNK if len(rest) < CHUNK else times * len(rest))
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", self.path) from None
        self._ended = not block
        text = self._decoded(block)
        # the byte order mark may come in several blocks
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\ufeff")
        self.text = rest + text
        return True

    def _decoded(self, block: bytes) -> str:
        before = self._bytes - len(self._decoder.getstate()[0])
        self._bytes += len(block)
        try:
            return self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            self._bad = before + error.start
            return error.object[: error.start].decode()

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
            except RecursionError:
                raise DataError("nested too deeply", self.path) from None
            except DuplicateKeyError as error:
                raise DataError(str(error), self.path, f"line {self.line()}") from None
            except json.JSONDecodeError as error:
                # an unclosed string may go on in the next chunk
                final = error.pos < len(self.text) - _MARGIN and not error.msg.startswith("Unterminated string")
                # decoding starts again each time, so it should be rare for a long value
                if final or not self.more(3):
                    raise self.error(error.msg, error.pos) from None
            except ValueError as error:  # more digits than Python converts, unless a fraction follows
                if _LONG_NUMBER.search(self.text, self.position) or not self.more():
                    raise DataError(f"not JSON: {error}", self.path) from None
            else:
                # a number may go on
                if isinstance(value, str | dict | list) or end < len(self.text) - _MARGIN or not self.more():
                    self.position = end
                    return value

    def error(self, message: str, position: int | None = None) -> DataError:
        return DataError(f"not JSON: {message}", self.path, f"line {self.line(position)}")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line from here on, without its line end (\\n alone ends lines)."""
        number, searched = self.line(), self.position
        while True:
            end = self.text.find("\n", searched)
            if end >= 0:
                line = self.text[self.position : end]
                self.position = searched = end + 1
                yield number, line
                number += 1
                continue
            held = len(self.text) - self.position
            if not self.more():
                break
            searched = held
        if self.position < len(self.text):
            line, self.position = self.text[self.position :], len(self.text)
            yield number, line


def parse_line(path: Path, number: int, line: str) -> Any:
    """The JSON value that a line is. Raises DataError with its number."""
    try:
        return _DECODER.decode(line)
    except RecursionError:
        raise DataError("nested too deeply", path, f"line {number}") from None
    except DuplicateKeyError as error:
        raise DataError(str(error), path, f"line {number}") from None
    except ValueError as error:
        raise DataError(f"not JSON: {getattr(error, 'msg', error)}", path, f"line {number}") from None
