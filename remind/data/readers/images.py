"""Image references: a local file must stay inside the data folder, a remote one is kept as text and never fetched."""

from __future__ import annotations

import re

from remind.core.errors import ImagePathError
from remind.data.readers.place import Place, shown

_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


def is_remote(reference: str) -> bool:
    """Whether a reference is a URL (`https://…`, `data:…`) rather than a path."""
    return _REMOTE.match(reference) is not None


def local_file(place: Place, reference: str) -> str:
    """The absolute path of an image file named in `place`, links resolved.

    Raises:
        ImagePathError: it leaves the folder of the data file, or there is no such file.
    """
    folder = place.path.parent.resolve()
    try:
        target = (folder / reference).resolve()
        inside, there = target.is_relative_to(folder), target.is_file()
    except (OSError, ValueError, RuntimeError):
        raise ImagePathError(f"image {shown(reference)} is not a usable path", place.path, place.record) from None
    if not inside:
        raise ImagePathError(f"image {shown(reference)} leaves the data folder {folder}", place.path, place.record)
    if not there:
        raise ImagePathError(f"image {shown(reference)}: no such file in {folder}", place.path, place.record)
    return str(target)


def find_file(place: Place, name: str) -> str | None:
    """The absolute path of the file `name` beside the data file of `place`, or in `images/` there, links resolved; None
    if there is none.

    Raises:
        ImagePathError: it is no plain file name but a path, or a link that leaves the folder of the data file.
    """
    if name in {".", ".."} or any(mark in name for mark in "/\\\0"):
        raise ImagePathError(
            f"image {shown(name)} is not a plain file name; it must not lead out of the folder of the chat",
            place.path,
            place.record,
        )
    root = place.path.parent.resolve()
    for candidate in (root / name, root / "images" / name):
        try:
            target = candidate.resolve()
            there, inside = target.is_file(), target.is_relative_to(root)
        except (OSError, ValueError, RuntimeError):  # a name too long for the file system, a link to itself
            return None
        if there and not inside:
            raise ImagePathError(f"image {shown(name)} leaves the data folder {root}", place.path, place.record)
        if there:
            return str(target)
    return None
