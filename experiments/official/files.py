"""Result files of other benchmarks, written back without touching a byte of what was not changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.core.files import atomic_path

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_BOM = b"\xef\xbb\xbf"
_MARKS = ((", ", ": "), (",", ":"))


class ResultFile:
    """A JSON-lines file, or a JSON document that is a list of objects.

    `records` may be edited in place. `dump` gives the bytes of the file: records that still say what the file said
    keep their bytes, changed ones follow the style (escapes, spaces, indent) of what they replace.

    Raises:
        DataError: no such file, not UTF-8, not JSON, or a record that is not an object.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            raise DataError("no such file", path) from None
        except IsADirectoryError:
            raise DataError("is a folder, a file was expected", path) from None
        self._bom = raw.startswith(_BOM)
        self._raw = raw.removeprefix(_BOM)
        self._whole = self._raw.lstrip()[:1] == b"["
        self._lines: list[bytes] = []
        self.records: list[dict[str, Any]] = list(self._document() if self._whole else self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        self._lines = _LINE.findall(self._raw)
        for number, line in enumerate(self._lines, start=1):
            if line.strip():
                yield self._object(_parse(line, self.path, f"line {number}"), f"line {number}")

    def _document(self) -> Iterator[dict[str, Any]]:
        for number, value in enumerate(_parse(self._raw, self.path, None), start=1):
            yield self._object(value, f"record {number}")

    def _object(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DataError("should be an object", self.path, place)
        return value

    def place(self, index: int) -> str:
        """Where record `index` stands, for a message."""
        if self._whole:
            return f"record {index + 1}"
        filled = [number for number, line in enumerate(self._lines, start=1) if line.strip()]
        return f"line {filled[index]}"

    def dump(self) -> bytes:
        """The file's bytes with the records as they now are. Records may be edited, not added or removed."""
        return (_BOM if self._bom else b"") + (self._dump_document() if self._whole else self._dump_rows())

    def _dump_rows(self) -> bytes:
        values = iter(self.records)
        return b"".join(self._like(line, next(values)) if line.strip() else line for line in self._lines)

    def _dump_document(self) -> bytes:
        return self._like(self._raw, self.records, (2, 4, 1, None))

    def _like(self, raw: bytes, value: Any, indents: tuple[int | None, ...] = (None,)) -> bytes:
        """`value` in place of the JSON that stands there, in its style; unchanged bytes where it says the same."""
        was = json.loads(raw)
        # as text: to Python 1, 1.0 and True are equal, in the file they are not
        if json.dumps(was) == json.dumps(value):
            return raw
        body = raw.decode().strip()
        before, after = raw.decode().split(body)
        # the likelier escapes first: a record may be ASCII where the file is not
        escapes = (True, False) if self._raw.isascii() else (False, True)
        styles: list[dict[str, Any]] = [
            {"ensure_ascii": escape, "indent": indent, "separators": (",", ": ") if indent else marks}
            for indent, escape, marks in product(indents, escapes, _MARKS)
        ]
        style = next((style for style in styles if json.dumps(was, **style) == body), styles[0])
        return (before + json.dumps(value, **style) + after).encode()

    def write(self, path: str | Path) -> None:
        """Write `dump` to a path."""
        with atomic_path(path) as temporary:
            temporary.write_bytes(self.dump())


def _parse(raw: bytes, path: Path, place: str | None) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start})", path, place) from None
    except RecursionError:
        raise DataError("nested too deeply", path, place) from None
    except ValueError as error:
        where = place or f"line {getattr(error, 'lineno', 1)}"
        raise DataError(f"not JSON: {getattr(error, 'msg', error)}", path, where) from None
