"""Files of images that a corpus names by URL alone, as LoCoMo and DialogCC do."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from remind.core.errors import DataError, shown
from remind.data.dialogue import Corpus, Image

#: How a file names its image, whatever its suffix.
NAMING = "the SHA-256 of its URL, <dialogue id>-<index>, or the last part of its URL"


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
