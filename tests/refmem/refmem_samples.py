"""Dialogues, items and votes made by hand, some with hostile text in them."""

from __future__ import annotations

from itertools import count
from random import Random

from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.refmem.items import Item
from remind.refmem.merge import Row

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'> & \"quoted\" 'so'",
    "שלום <b>עולם</b> \u202egnp.exe\u202c",
    "<!-- --> ]]> {{ 7 * 7 }} \u2028 \x1b[2J\x07",
)
SUBJECTS = (
    ("the pottery", "my clay", "a glaze", "the kiln", "that bowl"),
    ("the harbour", "my sailboat", "a regatta", "the anchor", "this lighthouse"),
    ("the garden", "my tomatoes", "a seedling", "the compost", "these roses"),
    ("the violin", "my orchestra", "a concert", "the melody", "that rehearsal"),
)
STANCES = ("I really enjoy", "I hope to see", "It is hard for me to face", "Yesterday I looked at", "I cherish")
#: What each of the two shares.
SCENES = (("a bowl on a table", "a boat near a lighthouse"), ("a dog on a couch", "a bridge in a forest"))


def talk(name: str = "talk", seed: int = 0, sessions: int = 14) -> Dialogue:
    """Two speakers who come back to four subjects over the sessions of ten turns, D1:1 to D14:10."""
    rng, index, made = Random(seed), count(), []
    for number in range(sessions):
        turns = []
        for place in range(10):
            subject, other = rng.sample(SUBJECTS[number % 4], 2)
            text = f"{rng.choice(STANCES)} {subject}. We saw {other} near the market."
            scene = f"a photo of {SCENES[place % 2][(number + place // 6) % 2]}"
            shown = (Image(next(index), None, scene, "http://x/y.jpg"),) if place % 3 == 0 else ()
            turns.append(Turn(f"D{number + 1}:{place + 1}", ("Ana", "Bo")[place % 2], text, None, shown))
        made.append(Session(f"S{number + 1}", f"2023-{1 + number % 12:02d}-{1 + number:02d}T10:00", tuple(turns)))
    return Dialogue(name, tuple(made))


def dialogue() -> Dialogue:
    """d1: three sessions of 40 turns T0, T1, …; every tenth shares an image; the first turns are hostile."""
    turns = []
    for number in range(120):
        text = HOSTILE[number] if number < len(HOSTILE) else f"We talked about subject {number} again."
        pictures = (Image(number // 10, caption=f"a photo {HOSTILE[0]}"),) if number % 10 == 5 else ()
        turns.append(Turn(f"T{number}", ("Ana", "דנה")[number % 2], text, images=pictures))
    return Dialogue(
        "d1", tuple(Session(f"S{n}", f"{n} May 2023", tuple(turns[40 * n - 40 : 40 * n])) for n in (1, 2, 3))
    )


def item(name: str, kind: str = "single", **changes: object) -> Item:
    """On turns of "d1"."""
    place = {"dialogue_id": "d1", "cluster_id": "d1-c0", "branch": "text", "dimension": "pattern_induction"}
    values: dict[str, object] = {
        "question": f"What does {name} show about Ana?",
        "options": () if kind == "direct" else ("she hikes", "she reads", "she sails", "she bakes"),
        "answers": {"single": ("B",), "multi": ("A", "C"), "direct": ("a quiet life",)}[kind],
        "candidates": ("a quiet life", "a loud life", "no life at all") if kind == "direct" else (),
        "evidence": ("T20", "T95"),
    }
    return Item(name, format=kind, **{**place, **values, **changes})  # type: ignore[arg-type]


def drafted(name: str, kind: str = "single", **changes: object) -> Item:
    """On turns D1:1 and D2:1 of "talk"; its first option is right."""
    options = () if kind == "direct" else ("walking", "cooking", "reading", "singing")
    base = {"dialogue_id": "talk", "question": "Which habit does Ana show?", "options": options, "answers": ("A",)}
    return item(name, kind, **{**base, "evidence": ("D1:1", "D2:1"), **changes})


def row(given: Item, annotator: str, answers: str | tuple[str, ...] | list[str] = (), **changes: object) -> Row:
    """A sure vote; letters may be given as one string."""
    shown = {"evidence": given.evidence, "images": given.images, "fingerprint": given.fingerprint}
    return Row(given.id, annotator, **{"answers": tuple(answers), "confidence": 5, **shown, **changes})  # type: ignore[arg-type]
