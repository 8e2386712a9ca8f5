"""Whether two answers mean the same: a verdict, and the rule that gives one by words."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from remind.text.words import stem, words

#: The offline judge's threshold on bag-of-words F1.
JUDGE_F1 = 0.6

_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    )
}
_UNKNOWN = ("no information", "not mentioned", "not enough information", "cannot be determined", "does not tell")


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one case.

    Attributes:
        value: whether the prediction means the same as a reference; None: there is no verdict, for or against.
        failure: why there is none: as in `remind.llm.request.Reply`, or "neither" where the reply is neither verdict.
        message: the same in a line.
    """

    value: bool | None
    failure: str | None = None
    message: str = ""


def _answer_tokens(text: str) -> list[str]:
    """Lower-case words without articles; thousands commas dropped, numbers to twelve as digits."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return [_NUMBERS.get(word, word) for word in words(text) if word not in _ARTICLES]


def declines(text: str) -> bool:
    """Whether an answer says that the dialogue does not tell."""
    plain = " ".join(words(text))
    return any(phrase in plain for phrase in _UNKNOWN)


def same_answer(reference: str, prediction: str) -> bool:
    """The rule of the offline judge.

    Equal if both decline; else if every number of the reference is in the prediction and either the reference's words
    stand in a row in it, or the bag-of-words F1 reaches `JUDGE_F1`.
    """
    if declines(reference) or declines(prediction):
        return declines(reference) and declines(prediction)
    gold, said = _answer_tokens(reference), _answer_tokens(prediction)
    if not gold or not said:
        return gold == said
    numbers = {token for token in gold if token.isdigit()}
    if not numbers <= set(said):
        return False
    if any(said[start : start + len(gold)] == gold for start in range(len(said) - len(gold) + 1)):
        return True
    common = sum((Counter(map(stem, gold)) & Counter(map(stem, said))).values())
    return 2 * common / (len(gold) + len(said)) >= JUDGE_F1
