"""Dialogue files: one reader per format, all behind `read`."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from remind.core.errors import DataError, FormatError
from remind.data.dialogue import Corpus
from remind.data.readers import chat, dialogcc, friends, locomo, longmemeval, msc, realtalk, refmem
from remind.data.readers.mapped import MappedReader
from remind.data.readers.mapping import SUFFIXES as MAPPING_SUFFIXES
from remind.data.readers.mapping import FieldMapping
from remind.data.readers.refmem import write_refmem
from remind.data.readers.source import Source, natural, shown

__all__ = ["FORMATS", "read", "sniff", "stream", "write_refmem"]

SUFFIXES = {".json", ".jsonl", ".csv"}
_log = logging.getLogger(__name__)


class Reader(NamedTuple):
    """`matches` looks at the first record of a file; `stream` takes all files of one corpus."""

    matches: Callable[[Source], bool]
    stream: Callable[[Sequence[Source]], Iterator[Corpus]]


_READERS = {
    "refmem": Reader(refmem.matches, refmem.stream),
    "locomo": Reader(locomo.matches, locomo.stream),
    "longmemeval": Reader(longmemeval.matches, longmemeval.stream),
    "realtalk": Reader(realtalk.matches, realtalk.stream),
    "msc": Reader(msc.matches, msc.stream),
    "dialogcc": Reader(dialogcc.matches, dialogcc.stream),
    "friends": Reader(friends.matches, friends.stream),
    # only where it is asked for: the same files are recognised as friends
    "friends_seasons": Reader(friends.matches, friends.stream_seasons),
    # last: it accepts any record with a text
    "chat": Reader(chat.matches, chat.stream),
}
#: Names of the formats.
FORMATS = tuple(_READERS)


def read(path: str | Path, format: str | None = None) -> Corpus:
    """Read a dialogue file, or the files of one format in a folder (`.json`, `.jsonl`, `.csv`; not in its subfolders).

    Args:
        path: a file or a folder. Files of a folder are read in natural order (`Chat_2` before `Chat_10`); those of
            another or no known format are left out with a warning in the log. Links are followed; image paths are
            relative to the folder of the link.
        format: one of `FORMATS`, or a mapping file (`.yaml`), which says where JSON of another shape keeps what is
            needed; by default it is recognised from the content.

    Raises:
        ConfigError: a mapping file that cannot be used.
        FormatError: an unknown format, a file that is not of it, or a folder with files of several formats.
        ImagePathError: a local image that is missing or leaves the folder of its file.
        DataError: a file or record that cannot be used; the message names file and record.
    """
    pieces = list(stream(path, format))
    return Corpus.merge(pieces, [path] * len(pieces))


def stream(path: str | Path, format: str | None = None) -> Iterator[Corpus]:
    """The corpus of `read` in pieces: `read(path) == Corpus.merge(list(stream(path)))`.

    A piece is a dialogue with its questions. Only one piece is held in memory, with the ids of dialogues and of
    RefMem-Bench questions, one file where a later line may belong to an earlier dialogue (chat in single turns,
    Friends), all files of Friends by season, and of a mapping file the questions in records of their own.

    Raises:
        As `read`, before the first piece or between two.
    """
    sources, _, reader = _opened(Path(path), format)
    return reader.stream(sources)


def format_of(path: str | Path, format: str | None = None) -> str:
    """The name of the format that `read` reads a path by; of a mapping file its own. Raises as `read`."""
    name = _opened(Path(path), format)[1]
    return Path(name).stem if mapping_files(name) else name


def _opened(path: Path, format: str | None) -> tuple[list[Source], str, Reader]:
    """The files of a path, their format and what reads them."""
    reader = None if format is None else _reader(path, format)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "no such file or folder" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DataError(reason, path) from None
    if stat.S_ISDIR(mode):
        paths, format = _folder(path, format, reader)
        sources = [Source(file) for file in paths]
    else:
        # a source that was examined holds its first record
        format = _check(Source(path), format, reader)
        sources = [Source(path)]
    return sources, format, reader or _READERS[format]


def mapping_files(format: str | None) -> list[Path]:
    """The mapping file that a format is, if it is one; it decides what is read as much as the data do."""
    return [Path(format)] if format is not None and format.lower().endswith(MAPPING_SUFFIXES) else []


def _reader(path: Path, format: str) -> Reader:
    """Raises FormatError for an unknown format, ConfigError for a mapping file that cannot be used."""
    for file in mapping_files(format):
        mapped = MappedReader(FieldMapping(file))
        return Reader(mapped.matches, mapped.stream)
    if format not in _READERS:
        known = ", ".join(FORMATS)
        raise FormatError(f"unknown format {shown(format)}; known: {known}, or a mapping file (.yaml)", path)
    return _READERS[format]


def sniff(source: Source) -> str | None:
    """The format of a file by its content, or None."""
    return next((name for name, reader in _READERS.items() if reader.matches(source)), None)


def _check(source: Source, format: str | None, reader: Reader | None) -> str:
    """The format of a single file, which must be `format` if that is given."""
    content = sniff(source)
    if format is not None and reader is not None and reader.matches(source):
        return format
    if content is not None and format is None:
        return content
    if longmemeval.without_haystack(source):
        raise FormatError(
            "holds LongMemEval's questions without haystacks; use a file of native instances", source.path
        )
    if content is None and not source.is_json and source.path.suffix.lower() in {".json", ".jsonl"}:
        raise DataError("not JSON: it begins with neither { nor [", source.path, "line 1")
    if format is not None:
        hint = "" if content is None else f": it looks like {content}"
        raise FormatError(f"not a {format} file{hint}", source.path)
    raise FormatError(f"not in a known format ({', '.join(FORMATS)}); see the readers for what each needs", source.path)


def _folder(folder: Path, format: str | None, reader: Reader | None) -> tuple[list[Path], str]:
    """The files of a folder that are of one format, and that format."""
    by_format: dict[str, list[Path]] = {}
    others: list[Path] = []
    for path in _files(folder):
        source = Source(path)
        name = sniff(source) if reader is None or not reader.matches(source) else format
        if name is None or (format is not None and name != format):
            others.append(path)
        else:
            by_format.setdefault(name, []).append(path)
    if not by_format:
        wanted = "a format we know" if format is None else f"format {format}"
        names = {file.parent.name for file in folder.glob("*/*") if file.suffix.lower() in SUFFIXES and file.is_file()}
        below = ", ".join(sorted(names)[:3])
        hint = f"; subfolders are not read, but there are data files in {below}/; use that" if names else ""
        raise FormatError(f"the folder holds no file of {wanted}{hint}", folder)
    if len(by_format) > 1:
        raise FormatError(f"the folder holds files of several formats ({', '.join(by_format)}); name one", folder)
    [(name, paths)] = by_format.items()
    for path in others:
        _log.warning("%s: left out, not a %s file", path, name)
    return paths, name


def _files(folder: Path) -> list[Path]:
    """Data files in natural order. Raises DataError for a link that leads nowhere."""
    try:
        entries = [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", folder) from None
    files: list[Path] = []
    for path in sorted(entries, key=lambda path: natural(path.name)):
        try:
            regular = stat.S_ISREG(path.stat().st_mode)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path) from None
        if regular:
            files.append(path)
        else:
            _log.warning("%s: left out, not a regular file", path)
    return files
