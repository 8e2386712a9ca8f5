"""Dialogue files: one reader per format, all behind `read`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from remind.core.errors import DataError, FormatError, shown
from remind.data.dialogue import Corpus, Image, note_ids
from remind.data.readers import chat, dialogcc, dialsim, friends, locomo, longmemeval, msc, perltqa, realtalk, refmem
from remind.data.readers.builder import PICKLED, Draft, head, natural
from remind.data.readers.mapped import MappedReader
from remind.data.readers.refmem import write_refmem

__all__ = ["FORMATS", "format_of", "mapping_files", "read", "sniff", "stream", "write_refmem"]

SUFFIXES = (".json", ".jsonl", ".csv", "_dialsim.pickle")
_log = logging.getLogger(__name__)
#: How a file names its image, whatever its suffix.
NAMING = "the SHA-256 of its URL, <dialogue id>-<index>, or the last part of its URL"


#: Takes all files of one corpus.
Drafts = Callable[[Sequence[Path]], Iterator[Draft]]


#: How a format is told by the `head` of a file, and read.
_READERS: dict[str, tuple[Callable[[dict[str, Any]], bool], Drafts]] = {
    "refmem": (lambda first: first.get("type") in refmem.TYPES, refmem.drafts),
    "locomo": (lambda first: isinstance(first.get("conversation"), dict), locomo.drafts),
    "longmemeval": (lambda first: "haystack_sessions" in first, longmemeval.drafts),
    "realtalk": (lambda first: any(map(locomo.SESSION.fullmatch, first)), realtalk.drafts),
    "msc": (lambda first: isinstance(first.get("dialog"), list), msc.drafts),
    "dialogcc": (lambda first: isinstance(first.get("dialogue"), list), dialogcc.drafts),
    "dialsim": (lambda first: PICKLED in first, dialsim.drafts),
    "perltqa": (
        lambda first: any({*perltqa.KINDS} <= {*one} for one in first.values() if isinstance(one, dict)),
        perltqa.drafts,
    ),
    "friends": (lambda first: first.keys() >= friends.COLUMNS, friends.drafts),
    # only where it is asked for: the same files are recognised as friends
    "friends_seasons": (lambda first: first.keys() >= friends.COLUMNS, friends.season_drafts),
    # last: it accepts any record with a text; True is a column of a CSV file
    "chat": (lambda first: any(first.get(key, True) is not True for key in chat.KEYS), chat.drafts),
}
#: Names of the formats.
FORMATS = tuple(_READERS)


def read(path: str | Path, format: str | None = None, images: str | Path | None = None) -> Corpus:
    """Read a dialogue file, or the files of one format in a folder (`.json`, `.jsonl`, `.csv`, `_dialsim.pickle`), not
    those in its subfolders.

    Args:
        path: a file or a folder. Files of a folder are read in natural order (`Chat_2` before `Chat_10`); those of
            another or no known format are left out with a warning in the log. Links are followed; image paths are
            relative to the folder of the link.
        format: one of `FORMATS`, or a mapping file (`.yaml`), which says where JSON of another shape keeps what is
            needed; by default it is recognised from the content.
        images: folder with the files of images that the data name by URL alone (`attached`).

    Raises:
        ConfigError: a mapping file that cannot be used.
        FormatError: an unknown format, a file that is not of it, or a folder with files of several formats.
        ImagePathError: a local image that is missing or leaves the folder of its file.
        DataError: a file or record that cannot be used; the message names file and record.
    """
    return Corpus.merge(list(stream(path, format, images)))


def stream(path: str | Path, format: str | None = None, images: str | Path | None = None) -> Iterator[Corpus]:
    """The corpus of `read` in pieces: `read(path) == Corpus.merge(list(stream(path)))`.

    A piece is a dialogue with its questions. Only one piece is held in memory, with the ids of all, the questions that
    stand in records of their own (RefMem-Bench, a mapping file), one file where a later line may belong to an earlier
    dialogue (chat in single turns, Friends), and all files of Friends by season. Turns without words and images are
    left out; how many there were stands in the log.

    Raises:
        As `read`, before the first piece or between two.
    """
    paths, _, drafts = _chosen(Path(path), format)
    first: dict[tuple[str, str], str | Path] = {}
    blank, files, taken = 0, {} if images is None else image_files(images), dict[str, str]()
    for draft in drafts(paths):
        piece = attached(draft.corpus(), files, taken)
        note_ids(piece, draft.place.path, first, draft.place.record)
        blank += piece.blank
        yield piece
    if not first:
        raise DataError("holds no dialogues", path)
    if images is not None and not taken:
        raise DataError(f"no file in it is named after an image of {path}: {NAMING}", images)
    if blank:
        _log.warning("%s: turns without words or images, which are left out: %d", path, blank)


def format_of(path: str | Path, format: str | None = None) -> str:
    """The name of the format that `read` reads a path by; of a mapping file its own. Raises as `read`."""
    name = _chosen(Path(path), format)[1]
    return Path(name).stem if mapping_files(name) else name


def mapping_files(format: str | None) -> list[Path]:
    """The mapping file that a format is, if it is one; it decides what is read as much as the data do."""
    return [Path(format)] if format is not None and format.lower().endswith((".yaml", ".yml")) else []


def sniff(path: Path) -> str | None:
    """The format of a file by its content, or None."""
    first = head(path)
    return next((name for name, (matches, _) in _READERS.items() if matches(first)), None)


def _chosen(path: Path, format: str | None) -> tuple[list[Path], str, Drafts]:
    """The files of a path that are of one format, that format, and what reads them. Raises as `read`."""
    known = f"{', '.join(FORMATS)}, or a mapping file (.yaml)"
    files = [path]
    if os.path.isdir(path):
        try:
            entries = [p for p in path.iterdir() if p.name.lower().endswith(SUFFIXES) and p.name[0] != "."]
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path) from None
        files = sorted((entry for entry in entries if not entry.is_dir()), key=lambda entry: natural(entry.name))
    for mapping in mapping_files(format):
        reader = MappedReader(mapping)
        return reader.files(files), str(format), reader.drafts
    if format is not None and format not in _READERS:
        raise FormatError(f"unknown format {shown(format)}; known: {known}", path)
    found: dict[str | None, list[Path]] = {}
    for file in files:
        fits = format is not None and _READERS[format][0](head(file))
        found.setdefault(format if fits else sniff(file), []).append(file)
    names = [name for name in found if name is not None]
    if format is None and len(names) > 1:
        raise FormatError(f"holds files of several formats ({', '.join(names)}); name one", path)
    name = format or next(iter(names), None)
    if name is None:
        raise FormatError(f"not in a known format: {known}; subfolders are not read", path)
    if name not in found:
        raise FormatError(f"not of format {name}" + (f": it looks like {names[0]}" if names else ""), path)
    for file in files:
        if file not in found[name]:
            _log.warning("%s: left out, not a %s file", file, name)
    return found[name], name, _READERS[name][1]


def image_files(folder: str | Path) -> dict[str, str]:
    """The files in a folder and its subfolders by the stem of their names. Raises DataError where there is none."""
    files = sorted(path for path in Path(folder).expanduser().rglob("*") if path.is_file())
    if not files:
        raise DataError("no such folder of images, or an empty one", folder)
    return {path.stem: os.path.abspath(path) for path in files}


def attached(piece: Corpus, files: Mapping[str, str], taken: dict[str, str]) -> Corpus:
    """Dialogues whose images without a path have that of the file that is named after them, as `NAMING` says.

    Args:
        files: paths by stem.
        taken: grows; stem of a file that is shown to the URL or id it is shown for.

    Raises:
        DataError: a file that two URLs end in the name of.
    """

    def found(dialogue: str, image: Image) -> Image:
        url = image.source or ""
        own, last = f"{dialogue}-{image.index}", Path(unquote(urlsplit(url).path)).stem
        for stem in (hashlib.sha256(url.encode()).hexdigest(), own, last):
            if image.path is None and stem in files:
                if taken.setdefault(stem, url or own) != (url or own):
                    what = f"{shown(taken[stem])} and {shown(url)} end alike; name their files by {NAMING}"
                    raise DataError(what, files[stem], dialogue)
                return replace(image, path=files[stem])
        return image

    if not files:
        return piece
    return replace(piece, dialogues=tuple(one.illustrated(partial(found, one.id)) for one in piece.dialogues))
