"""Real backbones, loaded once, and a dialogue of two sessions."""

from __future__ import annotations

import pytest
import torch
from small_corpus import talk

from remind.data.dialogue import Dialogue, Question
from remind.models.backbone import Backbone, load_backbone
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import FactualState, Segment, Strategy
from sae import TopKSAE


@pytest.fixture(scope="session")
def minilm() -> Backbone:
    return load_backbone("minilm")


@pytest.fixture(scope="session")
def nano() -> Backbone:
    return load_backbone("nano")


@pytest.fixture(scope="session")
def sentences() -> SentenceEncoder:
    return SentenceEncoder()


def saes_for(backbone: Backbone, layers: tuple[int, ...], d_sae: int = 96, k: int = 6) -> dict[int, TopKSAE]:
    """SAEs with random weights."""
    draws = {n: torch.Generator().manual_seed(n) for n in layers}
    return {n: TopKSAE(backbone.hidden_size, d_sae, k, generator=draws[n]).requires_grad_(False) for n in layers}


def dialogue(name: str = "d", word: str = "station") -> Dialogue:
    return talk(
        [
            "Ana: Good morning! Did you sleep well?",
            "Ben: Not really, the dog barked all night 😴",
            "Ana:  | a brown dog on a sofa",
            "Ben: That is the one. He loves naïve postmen. | -",
            "Ana: My bicycle was stolen on Tuesday, by the way.",
            "Ben: ",
        ],
        [
            f"Ben: I found a red bicycle near the {word}. | a red bicycle | a {word}",
            "Ana: It is mine! Thank you.",
            "Ben: Dinner is on you then.",
            "Ana: Gladly, do you like 寿司?",
        ],
        name=name,
    )


def state_of(
    strategy: Strategy | None = None, segments: tuple[Segment, ...] | None = None, of: Dialogue | None = None
) -> FactualState:
    if strategy is None:
        strategy = Strategy(("Look for things that were lost.",), speakers=("Ana",), entities=("bicycle", "station"))
    return FactualState(
        of or dialogue(),
        Question("q", "d", "What did Ana lose?"),
        (Segment(0, 2), Segment(4, 5), Segment(6, 9)) if segments is None else segments,
        strategy,
    )
