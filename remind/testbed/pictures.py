"""Pixels for the images of a corpus that has captions alone: each word of a caption is a shape of its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from remind.data.dialogue import Corpus, Image
from remind.data.readers import write_refmem

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

#: Words that draw nothing.
_EMPTY = frozenset(["a", "an", "the", "some", "this", "that", "of", "to", "in", "on", "with"])


def draw(caption: str) -> Pixels:
    """A square picture of a caption: a shape for each word, whose form, colour and place the word alone decides."""
    from PIL import Image, ImageDraw

    side = 96
    picture = Image.new("RGB", (side, side), (238, 238, 232))
    pen = ImageDraw.Draw(picture)
    for word in caption.casefold().replace(",", " ").split():
        if word in _EMPTY:
            continue
        code = hashlib.sha256(word.encode()).digest()
        size = side * (12 + code[0] % 10) // 60
        left, top = code[1] * (side - size) // 255, code[2] * (side - size) // 255
        box = (left, top, left + size, top + size)
        colour = (code[3] * 3 // 4, code[4] * 3 // 4, code[5] * 3 // 4)
        (pen.ellipse, pen.rectangle)[code[6] % 2](box, fill=colour)
    return picture


def illustrate(corpus: Corpus, folder: str | Path) -> Path:
    """Write a corpus as RefMem-Bench JSONL, with a drawn picture for every caption in images/ beside it.

    Returns:
        The JSONL file.
    """
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def drawn(image: Image) -> Image:
        caption = image.caption or ""
        path = folder / "images" / f"{hashlib.sha256(caption.encode()).hexdigest()[:16]}.png"
        if not path.exists():
            draw(caption).save(path)
        return replace(image, path=str(path))

    path = folder / "dialogues.jsonl"
    write_refmem(replace(corpus, dialogues=tuple(one.illustrated(drawn) for one in corpus.dialogues)), path)
    return path
