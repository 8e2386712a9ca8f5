"""A dialogue of the memory world as a user would have it, with questions, and models in place of endpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat
from words import WordEncoder

from remind.data.dialogue import Corpus, Dialogue, Question
from remind.data.readers import write_refmem
from remind.llm.endpoints import LLMConfig
from remind.memory_training import dialogues
from remind.memory_training.config import MemoryDataConfig
from remind.testbed.memory_world import Life, make_life

LIFE = make_life(0, 21, 2)
ENCODER = WordEncoder(dimension=64)


def dialogue(life: Life) -> Dialogue:
    return Dialogue(life.id, tuple(meeting.session for meeting in life.meetings))


def questions(life: Life) -> list[Question]:
    """Of the first session two, of the second one that needs both, and some that are of no use."""
    (first, *_), (second, *_) = (meeting.session.turns for meeting in life.meetings)
    name = life.id
    asked = [
        Question("a", name, "What was said first?", answers=(first.text,), evidence=(first.id,)),
        Question("b", name, "And what, again?", answers=("never",), evidence=(first.id,)),
        Question("c", name, "What was said later?", answers=(second.text,), evidence=(second.id, first.id)),
    ]
    useless: list[dict[str, Any]] = [
        {"evidence": ()},
        {"answers": ()},
        {"format": "single", "options": ("x", "y"), "answers": ("A",)},
    ]
    return [*asked, *(replace(asked[0], id=f"no{n}", **changes) for n, changes in enumerate(useless))]


def source(monkeypatch: pytest.MonkeyPatch, path: Path, **models: ScriptedChat) -> dialogues.Source:
    write_refmem(Corpus((dialogue(LIFE),), tuple(questions(LIFE))), path)
    monkeypatch.setattr(dialogues.Chats, "stage", lambda self, stage: models[stage])
    monkeypatch.setattr(dialogues, "SentenceEncoder", lambda: ENCODER)
    return dialogues.Source(MemoryDataConfig(str(path)), LLMConfig(), list(models))  # type: ignore[arg-type]
