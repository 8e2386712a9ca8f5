"""Typed errors, each with a one-line message: what is wrong, where, and what to do."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Longest text that a message quotes.
_QUOTED = 80
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _QUOTED
_REPR.maxlevel = 2


def shown(value: object) -> str:
    """A value as quoted in a message: shortened, and without control characters."""
    return _REPR.repr(value)


def named(record: str) -> str:
    """An id as used in a message: unchanged unless it is long or not printable."""
    return record if len(record) <= _QUOTED and record.isprintable() else shown(record)[1:-1]


def brief(error: BaseException) -> str:
    """Somebody else's error as quoted in a message: on one line, shortened."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def told(error: BaseException) -> str:
    """An error as a command says it: of the system with the file, which Python puts behind a number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = error.filename2 or error.filename  # the second is what a file was copied or moved to
    return f"{name}: {error.strerror}" if name else error.strerror


class RemindError(Exception):
    """Base of every error the toolkit raises on purpose; scripts print it as one line and exit with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class DataError(RemindError):
    """A file or record that cannot be used.

    Args:
        message: what is wrong and what to do.
        path: the file, if there is one.
        record: where in the file: a line number, a dialogue, turn or question id.
    """

    def __init__(self, message: str, path: str | Path | None = None, record: str | int | None = None) -> None:
        place = "" if path is None else str(path)
        if record is not None:
            place += f" [{named(str(record))}]" if place else f"[{named(str(record))}]"
        super().__init__(f"{place}: {message}" if place else message)
        self.path = None if path is None else Path(path)
        self.record = record


class FormatError(DataError):
    """A file that is not of the expected format, or of no known one."""


class ImagePathError(DataError):
    """An image path that is missing or that is outside the data folder."""


class ConfigError(RemindError):
    """A configuration that cannot be run: unknown key, value out of range, parts that do not fit together."""


class ModelError(RemindError):
    """A model, layer, SAE or checkpoint that cannot be used here, or a package that is missing for it."""


@contextmanager
def unusable(what: str) -> Iterator[None]:
    """What a library raises, of whatever kind, becomes a ModelError: "what: its words"."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{what}: {brief(error)}") from None
