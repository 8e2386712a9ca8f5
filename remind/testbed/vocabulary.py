"""The nano backbone's own words: wordings of prompts and of the world that are one token each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from remind import prompts
from remind.dialogue import DIMENSIONS, FORMATS, NO_INFORMATION
from remind.perception.strategy import guide
from remind.pyramid import MARKER
from remind.testbed.world import lexicon

#: Between the letters of an answer, and after a speaker: tokens only there.
INNER = (",", ": ")
_SLOT = re.compile(r"\{\w+\}")


def wordings() -> list[str]:
    """Every string that is one token, each once: fixed lines of rendered prompts, and words of the world."""
    return list(dict.fromkeys(text for text in (*_prompt(), *_world()) if text))


def _prompt() -> Iterator[str]:
    for visual in (False, True):
        for kind in FORMATS:
            yield prompts.render("answer", format=kind, visual=visual, no_information=NO_INFORMATION).strip()
    yield "\n\nConversation\n"
    yield f"\nGuide to the question\n{prompts.render('strategy').strip()}\n"
    yield f"\n{prompts.render('reminder', marker=MARKER).strip()}\n"
    yield f"\nReflection\n{prompts.render('summary').strip()}\n"
    yield from ("Target speaker: ", "Related entities: ", "\n", "\nQuestion: ", "Options:\n", "[…]\n", f"{MARKER}\n")
    yield from (f"[Session {number}]\n" for number in range(1, 10))
    yield from (
        "[Image #",
        " Caption] ",
        "<answer>",
        "<answer>[",
        "]</answer><explanation></explanation>",
        "</answer><explanation></explanation>",
    )
    for letter in "ABCD":
        yield f"{letter}. "
    for dimension in DIMENSIONS:
        for number, cue in enumerate(guide(dimension).reasoning, start=1):
            yield f"Step {number}: {cue}\n"


def _world() -> Iterator[str]:
    bank = lexicon()
    yield from bank["names"]
    yield from bank["fillers"]
    yield from (f"{lead}, " for lead in (*bank["leads"], bank["flag"]))
    for words in bank["dimensions"].values():
        for kind in ("ask", "gist", "frames"):
            for text in words[kind]:
                yield from _SLOT.split(text)
        for kind in ("topics", "keen", "averse", "texts", "scenes", "dodges", "frank"):
            yield from words.get(kind, ())
        if "fits" in words:
            yield from words["fits"]
        for entry in words["values"].values():
            yield from entry["label"]
            yield from entry["gist"]
            yield from entry.get("cues", ())
            yield from entry.get("fits", ())


def pattern(texts: Sequence[str]) -> str:
    """A regular expression that finds any of them, the longest first, never inside a word."""
    own = "|".join(map(_bounded, sorted(texts, key=lambda text: (-len(text), text))))
    names = "|".join(lexicon()["names"])
    # after a speaker of the world, and between the letters of an answer; elsewhere these stay what they are
    return rf"{own}|(?<={names}): |(?<=[A-D]),(?=[A-D])"


def _bounded(text: str) -> str:
    before = r"(?<!\p{L})" if text[0].isalpha() else ""
    after = r"(?!\p{L})" if text[-1].isalpha() else ""
    return before + re.escape(text).replace("\\\n", r"\n") + after
