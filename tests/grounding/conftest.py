"""Real backbones, loaded once, and random states full of text that looks like markers, headings and names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.models.backbone import Backbone, load_backbone
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import MARKER, FactualState, Segment, Strategy
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


TEXT = st.text(max_size=15) | st.sampled_from(
    [
        "My bicycle was stolen.",
        MARKER,
        f"{MARKER}\n{MARKER}",
        f"x\r\n{MARKER}\r\ny",
        f"\u2028{MARKER}\u2028",
        "[…]",
        "[Session 2]",
        "👩‍👩‍👧 family 😀😀",
        "naïve café 東京タワー",
        "  two  spaces ",
        "Ana: I said",
        "<|im_end|>",
        "\u200b",
        "",
    ]
)


@st.composite
def random_states(draw: st.DrawFn) -> FactualState:
    """A dialogue of one to three sessions, some segments of it, and a strategy."""
    sessions, image = [], 0
    for s in range(draw(st.integers(1, 3))):
        turns = []
        for t in range(draw(st.integers(1, 5))):
            captions = draw(st.lists(st.none() | TEXT, max_size=2)) if draw(st.booleans()) else []
            images = tuple(Image(image + n, caption=caption) for n, caption in enumerate(captions))
            image += len(images)
            speaker = draw(st.sampled_from(["Ann", "Anna", "Zoë 🌊", MARKER, f"{MARKER}\nAna"]))
            turns.append(Turn(f"{s}:{t}", speaker, draw(TEXT), images=images))
        sessions.append(Session(f"s{s}", draw(st.none() | st.just("2024-05-06")), tuple(turns)))
    dialogue = Dialogue("d", tuple(sessions))
    cuts = sorted(draw(st.sets(st.integers(0, len(dialogue.turns)), max_size=8)))
    segments = tuple(Segment(a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    strategy = Strategy(tuple(draw(st.lists(TEXT, max_size=2))), entities=tuple(draw(st.lists(TEXT, max_size=2))))
    question = Question("q", "d", draw(TEXT), format="single", options=("x", MARKER))
    return FactualState(dialogue, question, segments, strategy)


def turns_of(session: str, *lines: tuple[str, str, list[str | None]], first_image: int = 0) -> tuple[Turn, ...]:
    turns, image = [], first_image
    for number, (speaker, text, captions) in enumerate(lines):
        images = tuple(Image(image + n, caption=caption) for n, caption in enumerate(captions))
        image += len(images)
        turns.append(Turn(f"{session}:{number}", speaker, text, images=images))
    return tuple(turns)


def dialogue(name: str = "d", word: str = "station") -> Dialogue:
    first = turns_of(
        "a",
        ("Ana", "Good morning! Did you sleep well?", []),
        ("Ben", "Not really, the dog barked all night 😴", []),
        ("Ana", "", ["a brown dog on a sofa"]),
        ("Ben", "That is the one. He loves naïve postmen.", [None]),
        ("Ana", "My bicycle was stolen on Tuesday, by the way.", []),
        ("Ben", "", []),
    )
    second = turns_of(
        "b",
        ("Ben", f"I found a red bicycle near the {word}.", ["a red bicycle", f"a {word}"]),
        ("Ana", "It is mine! Thank you.", []),
        ("Ben", "Dinner is on you then.", []),
        ("Ana", "Gladly, do you like 寿司?", []),
        first_image=2,
    )
    return Dialogue(name, (Session("a", "2024-03-01", first), Session("b", "2024-03-05", second)))


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
