"""A real encoder, one of bags of words that keeps what it is given, and small dialogues."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.models.encoder import SentenceEncoder


@pytest.fixture(scope="session")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


class Bag:
    """A fast encoder: hashed bags of words as unit vectors.

    Attributes:
        seen: the texts that it was given.
    """

    name = "bag"
    dimension = 32

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str]) -> Tensor:
        self.seen += texts
        rows = torch.full((len(texts), self.dimension), 1e-3)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[sum(map(ord, word)) % self.dimension] += 1
        return torch.nn.functional.normalize(rows, dim=-1)

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        return self.encode(texts)

    def hold(self, texts: Sequence[str], vectors: Tensor) -> None:
        pass

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [self.count_tokens(text) for text in texts]


@pytest.fixture
def bag() -> Bag:
    return Bag()


def build(*sessions: Sequence[str], name: str = "d") -> Dialogue:
    """Each text is `Speaker: words` with an optional ` | caption`."""
    made, images = [], 0
    for number, texts in enumerate(sessions, start=1):
        turns = []
        for place, text in enumerate(texts, start=1):
            speaker, _, rest = text.partition(": ")
            said, bar, caption = rest.partition(" | ")
            shown = (Image(images, None, caption),) if bar else ()
            images += len(shown)
            turns.append(Turn(f"{number}:{place}", speaker, said, None, shown))
        made.append(Session(f"s{number}", f"2024-0{number}-01", tuple(turns)))
    return Dialogue(name, tuple(made))


PARK = build(
    [
        "Ana: Hello again!",
        "Ben: Hi Ana, how are you?",
        "Ana: I adopted a greyhound called Pixel from the shelter last week.",
        "Ben: Lovely! Is Pixel shy?",
        "Ana: Very shy. The vet says it takes months.",
        "Ben: By the way, my pottery class started on Monday.",
        "Ana: Oh nice, what did you make?",
        "Ben: A crooked bowl, glazed blue. | a blue bowl on a wooden table",
        "Ana: Looks great.",
    ],
    [
        "Ben: We are moving to Lisbon in October because of my new job.",
        "Ana: Wow. What will you do there?",
        "Ben: I will run the night desk of a newspaper.",
        "Ana: I would miss the quiet evenings.",
        "Ben: The rent is high, so we share a flat with my cousin Rita.",
    ],
    ["Ana: Pixel won a race!", "Ben: Congratulations to Pixel and to you."],
    name="park",
)


@pytest.fixture(scope="session")
def park() -> Dialogue:
    return PARK
