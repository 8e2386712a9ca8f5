"""The nano backbone's own words: wordings of prompts and of the world that are one token each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from remind.data.dialogue import DIMENSIONS, FORMATS, NO_INFORMATION
from remind.states import prompts
from remind.states.pyramid import MARKER
from remind.testbed.world import lexicon
from remind.text.strategy import guide

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
    """A regular expression that finds any of them, the longest first, never inside a word.

    Built as a tree, since it is tried at every character: one look at what stands there leaves one branch at most.
    """
    inside = [text for text in texts if text[0].isalpha()]
    other = [text for text in texts if not text[0].isalpha()]
    names = "|".join(lexicon()["names"])
    own = [rf"(?<!\p{{L}}){_tree(inside)}"] if inside else []
    own += [_tree(other)] if other else []
    # after a speaker of the world, and between the letters of an answer; elsewhere these stay what they are
    return "|".join([*own, rf": (?<=(?:{names}): )", r",(?<=[A-D],)(?=[A-D])"])


def _tree(texts: Iterable[str]) -> str:
    """Any of them: by the first character, then by the next; what is longer goes first."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[0], []).append(text)
    ways = [_branch(branches[first]) for first in sorted(branches)]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _branch(texts: Sequence[str]) -> str:
    """Any of these, which begin alike; where one ends with a letter no other letter follows."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
    start = "".join(character for character, _ in alike)
    longer = [text[len(start) :] for text in texts if text != start]
    literal = re.escape(start).replace("\\\n", r"\n")
    if len(longer) == len(texts):
        return literal + _tree(longer)
    end = r"(?!\p{L})" if start[-1].isalpha() else ""
    return f"{literal}(?:{_tree(longer)}|{end})" if longer else literal + end
