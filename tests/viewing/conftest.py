"""A long dialogue, and what the inspector shows of it without states on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig
from remind.models.backbone import load_backbone
from remind.states.pyramid import FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.viewing.inspector.page import Inspection
from sae import TopKSAE, pages

WORDS = re.findall(r"\w+", "dog walk rain tea garden blue train music bread night letter stone bird river cake sister")


def saes(*layers: int, d_sae: int = 96, k: int = 8) -> dict[int, TopKSAE]:
    """Of the nano backbone, with random weights."""
    made = {n: TopKSAE(128, d_sae, k, generator=torch.Generator().manual_seed(n)) for n in layers}
    return {layer: coder.requires_grad_(False) for layer, coder in made.items()}


def inspection_of(turns: int, *layers: int, **settings: Any) -> Inspection:
    """Of `long_state`, grounded with the nano backbone."""
    grounder = Grounder(load_backbone("nano"), saes(*layers), None, GroundingConfig(**settings))
    trace = grounder.trace(long_state(turns))
    return Inspection(trace, record_of(ReflectiveState(trace.state, "She likes tea."), "test"))


def long_state(turns: int) -> FactualState:
    """A dialogue of that many turns, all retrieved; every hundredth has a picture, every 37th is gold."""
    generator = torch.Generator().manual_seed(turns)
    said = []
    for n in range(turns):
        row = [WORDS[i] for i in torch.randint(0, len(WORDS), (17,), generator=generator).tolist()]
        images = (Image(n // 100, caption=f"a picture of {row[0]}"),) * (n % 100 == 0)
        said.append(Turn(f"s{n // 50}:{n}", ("Ana", "Ben")[n % 2], " ".join(row), images=images))
    gold = tuple(turn.id for turn in said[::37])
    question = Question("q-long", "long", "What does Ana like?", answers=("tea",), evidence=gold)
    strategy = Strategy(("Collect what is said about tea.",), speakers=("Ana",), entities=("tea", "cake"))
    talk = Dialogue("long", (Session("s", "2024-03-01", tuple(said)),))
    return FactualState(talk, question, (Segment(0, turns - 1),), strategy)


def data_of(path: Path) -> Any:
    """What the script of a page reads."""
    return pages.data_of(path.read_text(encoding="utf-8"))
