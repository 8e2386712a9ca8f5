"""Extraction the offline LLM rests on: sentences and how telling they are, overlap, and a rule for equal answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remind.data.dialogue import Dialogue
from remind.perception.segment import turn_text
from remind.states.pyramid import Segment, one_line
from remind.text.words import fillers, rarity, stem, stems, words

_SENTENCE = re.compile(r"(?<=[.!?…])\s+|\n+")
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    )
}
_UNKNOWN = ("no information", "not mentioned", "not enough information", "cannot be determined", "does not tell")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a turn, or the caption of one of its images."""

    speaker: str
    text: str
    caption: bool


def sentences(dialogue: Dialogue, segment: Segment) -> list[Sentence]:
    """What is said and shown in the segment, in order."""
    found = []
    for turn in dialogue.turns[segment.start : segment.end + 1]:
        speaker = one_line(turn.speaker)
        said = (one_line(part) for part in _SENTENCE.split(turn.text))
        found += [Sentence(speaker, part, False) for part in said if part]
        found += [Sentence(speaker, one_line(image.caption), True) for image in turn.images if image.caption]
    return found


def turn_rarity(dialogue: Dialogue) -> dict[str, float]:
    """Rarity of each stem over the dialogue's turns, captions included."""
    return rarity([stems(turn_text(turn)) for turn in dialogue.turns])


def telling(text: str, weights: Mapping[str, float]) -> float:
    """Summed rarity of the content stems, damped by length so that a long sentence does not win by length alone."""
    content = {stem(word) for word in words(text) if word not in fillers()}
    return sum(weights.get(term, 0.0) for term in content) / (len(text.split()) + 3) ** 0.5


def key_sentences(found: Sequence[Sentence], scores: Sequence[float], max_words: int) -> str:
    """The best-scored sentences that fit, in order, each a line with its speaker; never empty if `found` is not.

    Sentences that score nothing are left out, unless there are no others.
    """
    kept: list[int] = []
    used = 0
    for number in sorted(range(len(found)), key=lambda n: -scores[n]):
        length = len(found[number].text.split())
        if kept and (scores[number] <= 0 or used + length > max_words):
            continue
        kept.append(number)
        used += length
    return "\n".join(f"{found[number].speaker}: {found[number].text}" for number in sorted(kept))


def overlap(wanted: Iterable[str], text: str, weights: Mapping[str, float]) -> float:
    """Share, by rarity, of the wanted stems that the text holds; 0 if nothing is wanted. Unknown stems weigh most."""
    terms, there = set(wanted), set(stems(text))
    top = max(weights.values(), default=1.0) or 1.0
    total = sum(weights.get(term, top) for term in terms)
    return sum(weights.get(term, top) for term in terms & there) / total if total > 0 else 0.0


def answer_tokens(text: str) -> list[str]:
    """Lower-case words without articles; thousands commas dropped, numbers to twelve as digits."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return [_NUMBERS.get(word, word) for word in words(text) if word not in _ARTICLES]


def declines(text: str) -> bool:
    """Whether an answer says that the dialogue does not tell."""
    plain = " ".join(words(text))
    return any(phrase in plain for phrase in _UNKNOWN)


def same_answer(reference: str, prediction: str, threshold: float) -> bool:
    """The rule of the offline judge.

    Equal if both decline; else if every number of the reference is in the prediction and either the reference's words
    stand in a row in it, or the bag-of-words F1 reaches the threshold.
    """
    if declines(reference) or declines(prediction):
        return declines(reference) and declines(prediction)
    gold, said = answer_tokens(reference), answer_tokens(prediction)
    if not gold or not said:
        return gold == said
    numbers = {token for token in gold if token.isdigit()}
    if not numbers <= set(said):
        return False
    if any(said[start : start + len(gold)] == gold for start in range(len(said) - len(gold) + 1)):
        return True
    common = sum((Counter(map(stem, gold)) & Counter(map(stem, said))).values())
    return 2 * common / (len(gold) + len(said)) >= threshold
