"""One annotator's page: an HTML file that holds the dialogues and the items, and works from disk without a network."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import sha256_json, write_text
from remind.data.dialogue import Corpus, Dialogue, Image
from remind.refmem.annotation.context import Segments, demands, windows
from remind.refmem.annotation.shown import candidates_for, fingerprint, order_for
from remind.refmem.items import Item
from remind.states.pyramid import LETTERS
from sae.pages import page

#: Longer side of a picture in the page, in pixels.
PICTURE = 480


def write_annotation_page(
    items: Sequence[Item],
    corpus: Corpus,
    annotator: str,
    path: str | Path,
    *,
    seed: int = 0,
    around: int = 4,
    segments: Mapping[str, Segments] | None = None,
    pictures: bool = True,
) -> Path:
    """Write the page. The answers that generation takes for right are not in it.

    Args:
        seed: with the annotator's name, orders items and candidate answers.
        around, segments: see `windows`; segments by dialogue id.
        pictures: put the images in, made smaller; otherwise captions alone stand for them.

    Raises:
        ConfigError: no items, or a blank name.
        DataError: an item whose dialogue or evidence is missing.
        ImagePathError: an image file that cannot be read.
    """
    data = page_data(items, corpus, annotator, seed=seed, around=around, segments=segments, pictures=pictures)
    html = page(
        "remind.refmem.annotation",
        "page.html.j2",
        scripts=[("remind.refmem.annotation", name) for name in ("state.js", "context.js", "form.js", "keys.js")],
        styles=[("remind.refmem.annotation", "page.css")],
        data=data,
        pictures=True,
        annotator=annotator,
        total=len(items),
    )
    write_text(path, html)
    return Path(os.path.abspath(path))


def page_data(
    items: Sequence[Item],
    corpus: Corpus,
    annotator: str,
    *,
    seed: int = 0,
    around: int = 4,
    segments: Mapping[str, Segments] | None = None,
    pictures: bool = True,
) -> dict[str, Any]:
    """What the script of the page reads; see `write_annotation_page`."""
    if not items or not annotator.strip():
        raise ConfigError("a page needs items and the name of its annotator")
    ordered = order_for(items, annotator, seed)
    used = {item.dialogue_id: corpus.dialogue(item.dialogue_id) for item in ordered}
    hints = demands()
    return {
        "annotator": annotator,
        "build": sha256_json(sorted(fingerprint(item) for item in items))[:16],
        "letters": LETTERS,
        "items": [
            {
                "id": item.id,
                "dialogue": item.dialogue_id,
                "dimension": item.dimension.replace("_", " "),
                "hint": hints.get(item.dimension, ""),
                "format": item.format,
                "question": item.question,
                "choices": list(item.options) or candidates_for(item, annotator, seed),
                "evidence": list(item.evidence),
                "images": list(item.images),
                "near": windows(used[item.dialogue_id], item, around, (segments or {}).get(item.dialogue_id)),
                "fingerprint": fingerprint(item),
            }
            for item in ordered
        ],
        "dialogues": {name: _dialogue(dialogue, pictures) for name, dialogue in used.items()},
    }


def _dialogue(dialogue: Dialogue, pictures: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": session.id,
            "time": session.time,
            "turns": [
                {
                    "id": turn.id,
                    "speaker": turn.speaker,
                    "text": turn.text,
                    "images": [
                        {
                            "index": image.index,
                            "caption": image.caption,
                            "src": _picture(image) if pictures else None,
                        }
                        for image in turn.images
                    ],
                }
                for turn in session.turns
            ],
        }
        for session in dialogue.sessions
    ]


def _picture(image: Image) -> str | None:
    """The image as a data: URL; None where there is no file."""
    if image.path is None:
        return None
    from remind.models.chat import open_image

    opened = open_image(image.path)
    opened.thumbnail((PICTURE, PICTURE))
    out = io.BytesIO()
    opened.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")
