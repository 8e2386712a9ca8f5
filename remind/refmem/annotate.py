"""Annotation pages: one HTML file per annotator with the dialogues and the items, which opens from disk offline."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from remind.core.errors import ConfigError
from remind.core.files import sha256_json, write_text
from remind.core.progress import track
from remind.data.dialogue import Corpus, Dialogue, Image, Turn
from remind.data.readers import read
from remind.refmem.config import AnnotateConfig, file_name
from remind.refmem.items import Item, dialogue_of, read_items
from remind.states.pyramid import LETTERS
from remind.text.words import guide
from sae.pages import page

T = TypeVar("T")
#: Longer side of a picture in the page, in pixels.
PICTURE_SIZE = 480
#: Of an item as it is.
SHOWN = ("id", "format", "question", "evidence", "images", "fingerprint")


def write_pages(cfg: AnnotateConfig) -> list[Path]:
    """Write the annotators' pages and print their paths. Raises DataError for files that cannot be used."""
    items = read_items(cfg.drafts)
    paths = [cfg.input] if isinstance(cfg.input, str) else cfg.input
    corpus = Corpus.merge([read(path, cfg.format) for path in paths], paths)
    pages = []
    for name in track(cfg.annotators, "pages", len(cfg.annotators)):
        data = page_data(items, corpus, name, cfg.seed, cfg.around)
        pages.append(Path(cfg.out).absolute() / file_name(name))
        write_text(pages[-1], page_html(data))
    print("\n".join(f"page: {path}" for path in pages))
    return pages


def page_html(data: Mapping[str, Any]) -> str:
    """The page that shows `page_data`."""
    parts = ["page/page.css", *(f"page/{name}.js" for name in ("state", "context", "form", "keys"))]
    values = {"annotator": data["annotator"], "total": len(data["items"])}
    title = f"Annotation by {data['annotator']}"
    return page("remind.refmem", "page/page.html.j2", *parts, data=data, pictures=True, title=title, **values)


def page_data(items: Sequence[Item], corpus: Corpus, annotator: str, seed: int = 0, around: int = 4) -> dict[str, Any]:
    """The data of an annotator's page. The generated answers are not in it; images that have a file are, scaled down.

    The options are those of `AnnotateConfig`.

    Raises:
        ConfigError: no items.
        DataError: an item whose dialogue or evidence is missing.
        ImagePathError: an image file that cannot be read.
    """
    if not items:
        raise ConfigError("there are no items to annotate")
    ordered = in_order(sorted(items, key=lambda item: item.id), seed, annotator)
    dialogues = {item.dialogue_id: dialogue_of(item, corpus) for item in ordered}
    return {
        "annotator": annotator,
        "build": sha256_json(sorted(item.fingerprint for item in items))[:16],
        "letters": LETTERS,
        "items": [
            {
                **{name: getattr(item, name) for name in SHOWN},
                "dialogue": item.dialogue_id,
                "dimension": item.dimension.replace("_", " "),
                "hint": guide(item.dimension).demand,
                "choices": item.options or in_order(sorted({*item.candidates}), seed, annotator, item.id),
                "near": windows(dialogues[item.dialogue_id], item, around),
            }
            for item in ordered
        ],
        "dialogues": {name: _sessions(dialogue) for name, dialogue in dialogues.items()},
    }


def in_order(values: Iterable[T], *key: object) -> list[T]:
    """The values in an order drawn from the key: an annotator's of the items, or of an item's candidate answers.

    They come sorted, so that it does not depend on which candidates were generated as correct.
    """
    ordered = list(values)
    random.Random(":".join(map(str, key))).shuffle(ordered)
    return ordered


def windows(dialogue: Dialogue, item: Item, around: int) -> list[tuple[int, int]]:
    """Ranges of turns (first, last) around the proposed evidence, in order, at least one turn apart.

    Each holds `around` turns before and after within the session.
    """
    places = {dialogue.positions[turn] for turn in item.evidence}
    places |= {n for n, turn in enumerate(dialogue.turns) if any(image.index in item.images for image in turn.images)}
    session = [number for number, one in enumerate(dialogue.sessions) for _ in one.turns]
    near = {m for n in places for m in range(max(0, n - around), n + around + 1) if session[m : m + 1] == [session[n]]}
    starts = [n for n in sorted(near) if n - 1 not in near]
    ends = [n for n in sorted(near) if n + 1 not in near]
    return list(zip(starts, ends, strict=True))


def _sessions(dialogue: Dialogue) -> list[dict[str, Any]]:
    from remind.models.images import thumbnail

    def shown(image: Image) -> dict[str, Any]:
        source = thumbnail(image.path, PICTURE_SIZE) if image.path is not None else None
        return {"index": image.index, "caption": image.caption, "src": source}

    def said(turn: Turn) -> dict[str, Any]:
        return {"id": turn.id, "speaker": turn.speaker, "text": turn.text, "images": list(map(shown, turn.images))}

    return [{"id": one.id, "time": one.time, "turns": list(map(said, one.turns))} for one in dialogue.sessions]
