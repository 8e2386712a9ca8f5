"""A corpus small enough to be built many times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from remind.core.files import write_rows
from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.data.sample import sample_path
from remind.states.pyramid import Rendered

TALK = (
    ("Ana", "I gave up coffee after the new year, it kept me awake."),
    ("Ben", "Then what do you drink at work?"),
    ("Ana", "Mostly tea, and water from the garden well."),
    ("Ben", "My sister sold her violin to pay for the boat."),
    ("Ana", "Did she tell you where she sails to?"),
    ("Ben", "Only that the harbour is north of here."),
)


def rows(dialogues: int, first: int = 0) -> list[dict[str, object]]:
    """Lines of a RefMem-Bench file: dialogues of six turns with two questions each."""
    found: list[dict[str, object]] = []
    for number in range(first, first + dialogues):
        turns = [
            {"id": f"t{n}", "speaker": speaker, "text": f"{text} ({number})", "images": []}
            for n, (speaker, text) in enumerate(TALK)
        ]
        found.append({"type": "context", "id": f"c{number}", "sessions": [{"id": "s", "time": None, "turns": turns}]})
        common = {"type": "question", "context_id": f"c{number}", "images": []}
        found.append(
            {**common, "id": f"q{number}a", "question": f"What does Ana drink now, {number}?", "format": "direct",
             "options": [], "answers": ["tea"], "evidence": ["t2"]}
        )  # fmt: skip
        found.append(
            {**common, "id": f"q{number}b", "question": "What did Ben's sister sell?", "format": "single",
             "options": ["a boat", "a violin"], "answers": ["B"], "evidence": ["t3"]}
        )  # fmt: skip
    return found


def talk(*sessions: Sequence[str], name: str = "d") -> Dialogue:
    """A dialogue of turns `Speaker: words`, each with ` | caption` for every image (`-`: without a caption)."""
    made, numbers = [], count()
    for number, lines in enumerate(sessions, start=1):
        turns = []
        for place, line in enumerate(lines, start=1):
            said, *captions = line.split(" | ")
            speaker, _, text = said.partition(": ")
            images = tuple(Image(next(numbers), caption=None if one == "-" else one) for one in captions)
            turns.append(Turn(f"{number}:{place}", speaker, text, images=images))
        made.append(Session(f"s{number}", f"2024-03-0{number}", tuple(turns)))
    return Dialogue(name, tuple(made))


def first_dialogue(name: str, folder: Path, questions: int | None = None) -> Path:
    """A file of the bundled sample (train, dev, test), cut to its first dialogue and the (first) questions about it."""
    found = [json.loads(line) for line in (sample_path() / f"{name}.jsonl").read_text().splitlines()]
    context = next(row for row in found if row["type"] == "context")
    about = [row for row in found if row.get("context_id") == context["id"]]
    path = folder / f"{name}.jsonl"
    write_rows(path, [context, *about[:questions]])
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def short_haystack(remind_data: Path, folder: Path, others: int = 2) -> tuple[Path, dict[str, Any]]:
    """A file with LongMemEval's instance, cut to the sessions with evidence and the first others; and the instance."""
    (instance,) = json.loads((remind_data / "longmemeval" / "longmemeval_single.json").read_text())
    ids, gold = instance["haystack_session_ids"], instance["answer_session_ids"]
    more = [number for number, name in enumerate(ids) if name not in gold][:others]
    chosen = sorted([*more, *map(ids.index, gold)])
    for key in ("haystack_session_ids", "haystack_dates", "haystack_sessions"):
        instance[key] = [instance[key][number] for number in chosen]
    path = folder / "short.json"
    path.write_text(json.dumps([instance]))
    return path, instance


def strip_markers(rendered: Rendered) -> str:
    """The dialogue section without its marker lines."""
    start, end = rendered.dialogue
    kept, cursor = [], start
    for marker_start, marker_end in rendered.markers:
        kept.append(rendered.text[cursor:marker_start])
        cursor = marker_end
    return "".join([*kept, rendered.text[cursor:end]])
