"""Dialogue files: one reader per format, all behind `read`."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from remind.core.errors import DataError, FormatError
from remind.data.dialogue import Corpus
from remind.data.readers import chat, dialogcc, friends, locomo, longmemeval, msc, realtalk, refmem
from remind.data.readers.refmem import write_refmem
from remind.data.readers.source import Source, shown

__all__ = ["FORMATS", "read", "sniff", "stream", "write_refmem"]

SUFFIXES = {".json", ".jsonl", ".csv"}
_log = logging.getLogger(__name__)


class Reader(NamedTuple):
    """`matches` looks at the first record of a file; `stream` takes all files of one corpus."""

    matches: Callable[[Source], bool]
    stream: Callable[[Sequence[Source]], Iterator[Corpus]]


# chat comes last: it takes any record with a text
_READERS = {
    "refmem": Reader(refmem.matches, refmem.stream),
    "locomo": Reader(locomo.matches, locomo.stream),
    "longmemeval": Reader(longmemeval.matches, longmemeval.stream),
    "realtalk": Reader(realtalk.matches, realtalk.stream),
    "msc": Reader(msc.matches, msc.stream),
    "dialogcc": Reader(dialogcc.matches, dialogcc.stream),
    "friends": Reader(friends.matches, friends.stream),
    "chat": Reader(chat.matches, chat.stream),
}
#: The formats we read.
FORMATS = tuple(_READERS)


def read(path: str | Path, format: str | None = None) -> Corpus:
    """Read a dialogue file, or the files of one format in a folder (`.json`, `.jsonl`, `.csv`; not in its subfolders).

    Args:
        path: a file, or a folder; files of a folder are taken in natural order (`Chat_2` before `Chat_10`), and those
            that are of no format we know, or not of `format`, or no regular files, are left out with a warning in the
            log. Links are followed wherever they lead; image paths start from where the link lies.
        format: one of `FORMATS`; without it the content decides.

    Raises:
        FormatError: `format` is unknown, the file is not of it or of no format we know, a folder holds several formats.
        ImagePathError: a local image that is missing or leaves the folder of its file.
        DataError: no such file, no regular file, or a record that cannot be used; the message names file and record.
    """
    pieces = list(stream(path, format))
    return Corpus.merge(pieces, [path] * len(pieces))


def stream(path: str | Path, format: str | None = None) -> Iterator[Corpus]:
    """What `read` gives, in the same order, as a sequence of small corpora: `Corpus.merge(list(stream(path)))`.

    Each is whole in itself: a dialogue with its questions (several, where a RefMem-Bench file mixes the questions of
    several contexts). Of the file no more is held than the longest record, and the ids of dialogues over all pieces.
    Files are read twice where a later line may belong to an earlier dialogue (chat, Friends), RefMem-Bench three times.

    Raises:
        As `read`, before the first piece or between two: what came before an error is of no error itself.
    """
    path = Path(path)
    if format is not None and format not in _READERS:
        raise FormatError(f"unknown format {shown(format)}; known: {', '.join(FORMATS)}", path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "no such file or folder" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DataError(reason, path) from None
    # new sources: those looked at hold their first record, which is good where it is all there is
    if stat.S_ISDIR(mode):
        paths, format = _folder(path, format)
        sources = [Source(one) for one in paths]
    else:
        looked_at = Source(path)
        format = _check(looked_at, format)
        sources = [looked_at if looked_at.is_sole else Source(path)]
    return _READERS[format].stream(sources)


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


def _folder(folder: Path, format: str | None) -> tuple[list[Path], str]:
    found: dict[str, list[Path]] = {}
    others: list[Path] = []
    for path in _files(folder):
        source = Source(path)
        name = sniff(source) if format is None or not _READERS[format].matches(source) else format
        if name is None or (format is not None and name != format):
            others.append(path)
        else:
            found.setdefault(name, []).append(path)
    if not found:
        wanted = "a format we know" if format is None else f"format {format}"
        hint = _subfolders_with_data(folder)
        raise FormatError(f"the folder holds no file of {wanted}{hint}", folder)
    if len(found) > 1:
        raise FormatError(f"the folder holds files of several formats ({', '.join(found)}); name one", folder)
    for path in others:
        _log.warning("%s: left out, not a %s file", path, next(iter(found)))
    name, paths = next(iter(found.items()))
    return paths, name


def _subfolders_with_data(folder: Path) -> str:
    """A hint for folders whose data files lie one level down, which are not read."""
    names = {path.parent.name for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES and path.is_file()}
    return (
        f"; subfolders are not read, and data files lie in {', '.join(sorted(names)[:3])}/: name that" if names else ""
    )


def _files(folder: Path) -> list[Path]:
    """Data files in natural order. Raises DataError for a link that leads nowhere."""
    try:
        entries = [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", folder) from None
    files: list[Path] = []
    for path in sorted(entries, key=_natural):
        try:
            regular = stat.S_ISREG(path.stat().st_mode)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path) from None
        if regular:
            files.append(path)
        else:
            _log.warning("%s: left out, not a regular file", path)
    return files


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key by which numbers in names count as numbers."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", path.name)
    return [(0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts]
