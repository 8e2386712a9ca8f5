"""Small dialogues with recurring subjects, made up here, and items of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.refmem.items import Item

SUBJECTS = {
    "pottery": ["the pottery", "my clay", "a glaze", "the kiln", "that bowl"],
    "sailing": ["the harbour", "my sailboat", "a regatta", "the anchor", "this lighthouse"],
    "garden": ["the garden", "my tomatoes", "a seedling", "the compost", "these roses"],
    "music": ["the violin", "my orchestra", "a concert", "the melody", "that rehearsal"],
}
STANCES = ["I really enjoy", "I hope to see", "It is hard for me to face", "Yesterday I looked at", "I cherish"]
#: What each of the two shares.
SCENES = [
    ["a photo of a bowl on a table", "a photo of a boat near a lighthouse", "a photo of a rose in a garden"],
    ["a photo of a dog on a couch", "a photo of a bridge in a forest", "a photo of a guitar near a window"],
]


def made_dialogue(name: str = "talk", seed: int = 0, sessions: int = 14, images: bool = True) -> Dialogue:
    """Two speakers who come back to four subjects over the sessions."""
    rng = Random(seed)
    made, index = [], 0
    for number in range(sessions):
        turns = []
        topic = list(SUBJECTS)[number % len(SUBJECTS)]
        for place in range(10):
            subject = rng.choice(SUBJECTS[topic if place < 8 else rng.choice(list(SUBJECTS))])
            other = rng.choice(SUBJECTS[topic])
            text = f"{rng.choice(STANCES)} {subject}. We saw {other} near the market."
            shown: tuple[Image, ...] = ()
            if images and place % 3 == 0:
                shown = (Image(index, None, SCENES[place % 2][(number + place // 6) % 3], f"http://x/{index}.jpg"),)
                index += 1
            turns.append(Turn(f"D{number + 1}:{place + 1}", ("Ana", "Bo")[place % 2], text, None, shown))
        time = f"2023-{1 + number % 12:02d}-{1 + number:02d}T10:00"
        made.append(Session(f"S{number + 1}", time, tuple(turns)))
    return Dialogue(name, tuple(made))


@pytest.fixture
def make_dialogue() -> Callable[..., Dialogue]:
    return made_dialogue


@pytest.fixture
def corpus() -> Corpus:
    return Corpus((made_dialogue("talk", 0), made_dialogue("chat", 1)))


@pytest.fixture
def make_item() -> Callable[..., Item]:
    """An item on turns D1:1 and D2:1 of "talk"; any field can be given."""
    count = iter(range(10_000))

    def make(**fields: object) -> Item:
        base: dict[str, object] = {
            "id": f"i{next(count)}",
            "dialogue_id": "talk",
            "cluster_id": "talk/text-0",
            "branch": "text",
            "dimension": "pattern_induction",
            "format": "single",
            "question": "Which habit does Ana show?",
            "options": ("walking", "cooking", "reading", "singing"),
            "answers": ("A",),
            "evidence": ("D1:1", "D2:1"),
        }
        return Item(**{**base, **fields})  # type: ignore[arg-type]

    return make
