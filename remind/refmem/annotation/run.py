"""Pages for all annotators, or one annotator's sitting in the terminal."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from remind.core.errors import ConfigError
from remind.core.progress import track
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.refmem.annotation.page import write_annotation_page
from remind.refmem.annotation.terminal import annotate
from remind.refmem.items import read_items
from remind.refmem.segments import read_pieces


@dataclass
class AnnotateConfig:
    """Have people check draft items: a page for each annotator, or a sitting in the terminal."""

    drafts: str
    """Draft items (items.jsonl of a build's filtered stage)."""
    input: str | list[str]
    """The dialogues of that build; a list of several is merged."""
    out: str
    """Folder for the pages (annotate_NAME.html), or for the terminal's rows (annotations_NAME.jsonl)."""
    mode: Literal["pages", "terminal"] = "pages"
    """pages: one HTML file each, to be opened from disk; terminal: ask here, for one annotator."""
    annotators: list[str] = field(default_factory=lambda: ["A", "B", "C"])
    """Their names; with the seed a name sets the order of items and candidate answers."""
    format: str | None = None
    """Format of the dialogues; None: recognised from the content."""
    seed: int = 0
    """Other orders with another seed."""
    around: int = 4
    """Turns shown before and after each proposed evidence turn; the rest of the dialogue is a key away."""
    segments: str | None = None
    """Topical segments of the build (segments.jsonl); those that hold evidence are then shown whole."""
    pictures: bool = True
    """Put images with a file into the page, made smaller; otherwise captions alone."""

    def __post_init__(self) -> None:
        names = [slug(name) for name in self.annotators]
        if not names or not all(name.strip() for name in self.annotators) or len(set(names)) < len(names):
            raise ConfigError("annotators: give at least one name, all different as file names")
        if self.mode == "terminal" and len(names) > 1:
            raise ConfigError("the terminal is for one annotator: --annotators '[NAME]'")
        if self.around < 0:
            raise ConfigError(f"around is at least 0, not {self.around}")


def slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.-]+", "_", name.strip())


def run(cfg: AnnotateConfig) -> list[Path]:
    """See `AnnotateConfig`.

    Returns:
        The pages, or the terminal's file.

    Raises:
        DataError, FormatError, ImagePathError: files that cannot be used.
    """
    items = read_items(cfg.drafts)
    paths = [cfg.input] if isinstance(cfg.input, str) else cfg.input
    corpus = Corpus.merge([read(path, cfg.format) for path in paths], paths)
    segments: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for piece in read_pieces(cfg.segments) if cfg.segments else ():
        segments[piece.dialogue_id].append((piece.start, piece.end))
    out = Path(cfg.out)
    if cfg.mode == "terminal":
        path = out / f"annotations_{slug(cfg.annotators[0])}.jsonl"
        annotate(items, corpus, cfg.annotators[0], path, seed=cfg.seed, around=cfg.around, segments=segments)
        print(f"annotations: {path}")
        return [path]
    pages = [
        write_annotation_page(
            items,
            corpus,
            name,
            out / f"annotate_{slug(name)}.html",
            seed=cfg.seed,
            around=cfg.around,
            segments=segments,
            pictures=cfg.pictures,
        )
        for name in track(cfg.annotators, "pages", len(cfg.annotators))
    ]
    print("\n".join(f"page: {page}" for page in pages))
    return pages
