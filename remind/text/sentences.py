"""Sentences of turns, and the key ones among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remind.data.dialogue import Turn
from remind.states.pyramid import one_line
from remind.text.words import fillers, stem, words

#: Key sentences together, in words; about what the text encoder still reads whole.
KEY_WORDS = 60
_SENTENCE = re.compile(r"(?<=[.!?…])\s+|\n+")


class Sentence(NamedTuple):
    """A sentence of a turn, or the caption of one of its images."""

    speaker: str
    text: str
    caption: bool


def sentences(turns: Iterable[Turn]) -> list[Sentence]:
    """What is said and shown in the turns, in order."""
    parts = []
    for turn in turns:
        speaker = one_line(turn.speaker)
        said = (one_line(part) for part in _SENTENCE.split(turn.text))
        parts += [Sentence(speaker, part, False) for part in said if part]
        parts += [Sentence(speaker, one_line(image.caption), True) for image in turn.images if image.caption]
    return parts


def telling(text: str, weights: Mapping[str, float]) -> float:
    """Summed rarity of the content stems, damped by length so that a long sentence does not win by length alone."""
    content = {stem(word) for word in words(text) if word not in fillers()}
    return sum(weights.get(term, 0.0) for term in content) / (len(text.split()) + 3) ** 0.5


def key_sentences(said: Sequence[Sentence], scores: Sequence[float]) -> str:
    """The best-scored sentences within `KEY_WORDS`, in order, each a line with its speaker; the best one at any length.

    Sentences that score nothing are left out, unless there are no others.
    """
    chosen: list[int] = []
    used = 0
    for number in sorted(range(len(said)), key=lambda n: -scores[n]):
        length = len(said[number].text.split())
        if chosen and (scores[number] <= 0 or used + length > KEY_WORDS):
            continue
        chosen.append(number)
        used += length
    return "\n".join(f"{said[number].speaker}: {said[number].text}" for number in sorted(chosen))
