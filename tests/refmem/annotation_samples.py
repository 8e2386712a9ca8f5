"""Items and a dialogue made by hand, with hostile text in them."""

from __future__ import annotations

from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.refmem.annotations import Row
from remind.refmem.items import Item

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'> & \"quoted\" 'so'",
    "שלום <b>עולם</b> \u202egnp.exe\u202c",
    "<!-- --> ]]> {{ 7 * 7 }} \u2028 \x1b[2J\x07",
)


def dialogue(name: str = "d1", sessions: int = 3, turns: int = 40) -> Dialogue:
    """`sessions` sittings of `turns` turns T0, T1, …; every tenth shares an image; the first turns are hostile."""
    made, image = [], 0
    for s in range(sessions):
        lines = []
        for n in range(turns):
            number = s * turns + n
            text = HOSTILE[number] if number < len(HOSTILE) else f"We talked about subject {number} again."
            pictures = ()
            if number % 10 == 5:
                pictures = (Image(image, caption=f"a photo, number {image} {HOSTILE[0] if image == 0 else ''}"),)
                image += 1
            lines.append(Turn(f"T{number}", ("Ana", "דנה")[number % 2], text, images=pictures))
        made.append(Session(f"S{s + 1}", f"{s + 1} May 2023", tuple(lines)))
    return Dialogue(name, tuple(made))


def item(name: str, kind: str = "single", **changes: object) -> Item:
    values: dict[str, object] = {
        "id": name,
        "dialogue_id": "d1",
        "cluster_id": "d1-c0",
        "branch": "text",
        "dimension": "pattern_induction",
        "format": kind,
        "question": f"What does {name} show about Ana?",
        "options": () if kind == "direct" else ("she hikes", "she reads", "she sails", "she bakes"),
        "answers": {"single": ("B",), "multi": ("A", "C"), "direct": ("a quiet life",)}[kind],
        "candidates": ("a quiet life", "a loud life", "no life at all") if kind == "direct" else (),
        "evidence": ("T20", "T95"),
        "made_by": "template-secret",
        "prompt_id": "prompt-secret",
    }
    return Item(**{**values, **changes})  # type: ignore[arg-type]


def corpus() -> Corpus:
    return Corpus((dialogue(),))


def row(given: Item, annotator: str, answers: str | tuple[str, ...] = (), **changes: object) -> Row:
    """A sure vote; letters may be given as one string."""
    values: dict[str, object] = {
        "item_id": given.id,
        "annotator": annotator,
        "answers": tuple(answers),
        "evidence": given.evidence,
        "images": given.images,
        "confidence": 5,
        "fingerprint": given.fingerprint,
    }
    return Row(**{**values, **changes})  # type: ignore[arg-type]
