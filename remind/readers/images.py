"""Image references: a local file must stay inside the data folder, a remote one is kept as text and never fetched."""

from __future__ import annotations

import re
from pathlib import Path

from remind.errors import ImagePathError
from remind.readers.place import Place, shown

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


def find_file(folder: Path, name: str) -> str | None:
    """The absolute path of the file `name` in `folder` or its `images/`, links resolved; None if there is none."""
    if not name or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
        return None
    root = folder.resolve()
    for candidate in (root / name, root / "images" / name):
        try:
            target = candidate.resolve()
            if target.is_relative_to(root) and target.is_file():
                return str(target)
        except (OSError, ValueError, RuntimeError):  # a name too long for the file system, a link to itself
            return None
    return None
