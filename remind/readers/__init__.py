"""Dialogue files: one reader per format, all behind `read`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from remind.dialogue import Corpus
from remind.errors import DataError, FormatError
from remind.readers import chat, dialogcc, friends, locomo, longmemeval, msc, realtalk, refmem
from remind.readers.refmem import write_refmem
from remind.readers.source import Source

__all__ = ["FORMATS", "read", "sniff", "write_refmem"]

SUFFIXES = {".json", ".jsonl", ".csv"}
_log = logging.getLogger(__name__)


class Reader(NamedTuple):
    """`matches` looks at the first record of a file; `read` takes all files of one corpus."""

    matches: Callable[[Source], bool]
    read: Callable[[Sequence[Source]], Corpus]


# chat comes last: it takes any record with a text
_READERS = {
    "refmem": Reader(refmem.matches, refmem.read),
    "locomo": Reader(locomo.matches, locomo.read),
    "longmemeval": Reader(longmemeval.matches, longmemeval.read),
    "realtalk": Reader(realtalk.matches, realtalk.read),
    "msc": Reader(msc.matches, msc.read),
    "dialogcc": Reader(dialogcc.matches, dialogcc.read),
    "friends": Reader(friends.matches, friends.read),
    "chat": Reader(chat.matches, chat.read),
}
#: The formats we read.
FORMATS = tuple(_READERS)


def read(path: str | Path, format: str | None = None) -> Corpus:
    """Read a dialogue file, or the files of one format in a folder (`.json`, `.jsonl`, `.csv`; not in its subfolders).

    Args:
        path: a file, or a folder; files of a folder are taken in natural order (`Chat_2` before `Chat_10`), and those
            that are of no format we know, or not of `format`, are left out with a warning in the log.
        format: one of `FORMATS`; without it the content decides.

    Raises:
        FormatError: `format` is unknown, the file is not of it or of no format we know, a folder holds several formats.
        ImagePathError: a local image that is missing or leaves the folder of its file.
        DataError: no such file, or a record that cannot be used; the message names file and record.
    """
    path = Path(path)
    if format is not None and format not in _READERS:
        raise FormatError(f"unknown format {format!r}; known: {', '.join(FORMATS)}", path)
    if path.is_dir():
        sources, format = _folder(path, format)
    elif path.exists():
        sources = [Source(path)]
        format = _check(sources[0], format)
    else:
        raise DataError("no such file or folder", path)
    return _READERS[format].read(sources)


def sniff(source: Source) -> str | None:
    """The format of a file by its content, or None."""
    return next((name for name, reader in _READERS.items() if reader.matches(source)), None)


def _check(source: Source, format: str | None) -> str:
    """The format of a single file, which must be `format` if that is given."""
    found = sniff(source)
    if format is not None and _READERS[format].matches(source):
        return format
    if found is not None and format is None:
        return found
    if longmemeval.without_haystack(source):
        raise FormatError(
            "holds LongMemEval's questions without haystacks; use a file of native instances", source.path
        )
    if found is None and not source.is_json and source.path.suffix.lower() in {".json", ".jsonl"}:
        raise DataError("not JSON: it begins with neither { nor [", source.path, "line 1")
    if format is not None:
        hint = "" if found is None else f": it looks like {found}"
        raise FormatError(f"not a {format} file{hint}", source.path)
    raise FormatError(f"of no format we know ({', '.join(FORMATS)}); see the readers for what each needs", source.path)


def _folder(folder: Path, format: str | None) -> tuple[list[Source], str]:
    paths = (p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file())
    found: dict[str, list[Source]] = {}
    others: list[Path] = []
    for path in sorted(paths, key=_natural):
        source = Source(path)
        name = sniff(source) if format is None or not _READERS[format].matches(source) else format
        if name is None or (format is not None and name != format):
            others.append(path)
        else:
            found.setdefault(name, []).append(source)
    if not found:
        wanted = "a format we know" if format is None else f"format {format}"
        raise FormatError(f"the folder holds no file of {wanted}", folder)
    if len(found) > 1:
        raise FormatError(f"the folder holds files of several formats ({', '.join(found)}); name one", folder)
    for path in others:
        _log.warning("%s: left out, not a %s file", path, next(iter(found)))
    name, sources = next(iter(found.items()))
    return sources, name


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key by which numbers in names count as numbers."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", path.name)
    return [(0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts]
