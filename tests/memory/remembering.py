"""Dialogues in LoCoMo's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def locomo_dialogue(name: str, sessions: Iterable[Iterable[str]], asked: list[dict[str, Any]]) -> dict[str, Any]:
    """A dialogue in LoCoMo's format, in which Ann and Bob take turns, and questions about it."""
    talk: dict[str, Any] = {"speaker_a": "Ann", "speaker_b": "Bob"}
    for number, texts in enumerate(sessions, start=1):
        talk[f"session_{number}_date_time"] = f"1:56 pm on {number} May, 2023"
        talk[f"session_{number}"] = [
            {"speaker": "Ann" if n % 2 else "Bob", "dia_id": f"D{number}:{n}", "text": text}
            for n, text in enumerate(texts, start=1)
        ]
    return {"sample_id": name, "conversation": talk, "qa": asked}


#: Sessions of lines in which a word of a question leads to the turn that answers it.
SAID = [
    ["I adopted a dog called Rex.", "How lovely, a puppy!", "He is two years old."],
    ["We moved to Lisbon in May.", "Is it warm there?", "Very warm, and the tiles are blue."],
]


def locomo_file(
    path: Path, names: Iterable[str], said: list[list[str]], asked: list[dict[str, Any]], **more: Any
) -> Path:
    """Dialogues in LoCoMo's format, whose turns and questions differ in their last word."""
    samples = []
    for name in names:
        own = [{**one, "question": f"{one['question']} {name}"} for one in asked]
        samples.append(locomo_dialogue(name, [[f"{line} {name}" for line in lines] for lines in said], own) | more)
    path.write_text(json.dumps(samples))
    return path
