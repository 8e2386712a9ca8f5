"""The page that lists the pages of many questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from remind.core.files import write_text
from remind.viewing.inspector.collect import Inspection
from sae.pages import page


@dataclass(frozen=True)
class IndexRow:
    """A question in the list. gold, held, marked: gold evidence turns in all, in x0, and inside blocks.

    right: by level, whether the model's answer is; None where only a judge could tell, or there is none.
    """

    name: str
    id: str
    dialogue: str
    kind: str
    text: str
    turns: int
    blocks: int
    gold: int
    held: int
    marked: int
    right: dict[str, bool | None]

    @classmethod
    def of(cls, inspection: Inspection, name: str) -> IndexRow:
        question = inspection.question
        kinds = [question.format, question.dimension, None if question.category is None else str(question.category)]
        return cls(
            name=name,
            id=question.id,
            dialogue=question.dialogue_id,
            kind=" · ".join(kind.replace("_", " ") for kind in kinds if kind),
            text=question.text,
            turns=len(inspection.state.turns),
            blocks=len(inspection.blocks),
            gold=len(inspection.wanted),
            held=len(inspection.gold),
            marked=len(inspection.gold & inspection.marked),
            right={level: given.right for level, given in inspection.answers.items()},
        )


def write_index(rows: Sequence[IndexRow], path: str | Path, states: str) -> Path:
    """Write the list; every page lies beside it."""
    known = [row for row in rows if row.gold]
    total = sum(row.gold for row in known)
    html = page(
        "remind.viewing.inspector",
        "index.html.j2",
        scripts=[("remind.viewing.inspector", "index.js")],
        styles=[("remind.viewing.inspector", "index.css")],
        rows=[{**asdict(row), "href": quote(row.name)} for row in rows],
        levels=sorted({level for row in rows for level in row.right}),
        states=states,
        held=sum(row.held for row in known) / total if total else None,
        marked=sum(row.marked for row in known) / total if total else None,
    )
    write_text(path, html)
    return Path(os.path.abspath(path))
