"""The letters of options that a model names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remind.states.pyramid import LETTERS, one_line

_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\].:]?")
#: A letter followed by its option's words: "A. hiking", "(b) hiking".
_LETTER_AND_WORDS = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[).:])\s+(?=\S)")
#: What may stand round an option's words, and what parts one option from the next.
_ROUND, _BETWEEN = r"[\"'“”.!?]*", re.compile(r"(?:[\s,;/&|，、；]|\band\b|\bor\b)+", re.IGNORECASE)
#: The set of no options, written out.
_EMPTY_SET = re.compile(r"\[\s*\]|\{\s*\}|\(\s*\)|∅")


def letters_in(answer: str, options: Sequence[str], problems: list[str] | None = None) -> frozenset[str]:
    """The letters of `[A,D]`, `a and d`, `(A)`, `A. words; D. words`, or the words of an option; only those that name
    one.

    Args:
        problems: grows by departures from the asked form, as `ParsedAnswer.problems`; None: they are not wanted.
    """
    problems = [] if problems is None else problems
    named: list[str] = []
    bare = re.sub("[*`]", "", answer).strip("[](){}\"' ")
    pieces = [piece.strip("\"'") for piece in re.split(r"[,;/&\s]+|\band\b", bare)]
    matches = [_LETTER.fullmatch(piece) for piece in pieces if piece]
    if matches and all(matches):
        named = [match.group(1) for match in matches if match]
    elif found := _LETTER_AND_WORDS.match(bare):
        named = _listed(bare, options) or [found[1] or found[2]]
        problems.append("words beside the letter")
    else:
        texts = [one_line(option) for option in options] if answer else []
        matching = [i for i, option in enumerate(texts) if option == answer]
        matching = matching or [i for i, option in enumerate(texts) if option.casefold() == answer.casefold()]
        if len(matching) == 1:
            named = [LETTERS[matching[0]]]
            problems.append("words of an option for its letter")
        elif matching:
            problems.append("words of several options")
    if any(letter.islower() for letter in named):
        problems.append("lower-case letters")
    allowed = LETTERS[: len(options)]
    letters = frozenset(letter.upper() for letter in named)
    valid = frozenset(letter for letter in letters if letter in allowed)
    if len(valid) < len(letters):
        problems.append("letters that name no option")
    if not letters:
        problems.append("empty option set" if _EMPTY_SET.fullmatch(answer) else "no option letter")
    return valid


def _listed(text: str, options: Sequence[str]) -> list[str]:
    """Letters with their options' words, or with any between semicolons; none where there is anything else, which may
    speak of an option that is not chosen."""
    parts = [_LETTER_AND_WORDS.match(part.strip()) for part in re.split("[;；]", text)]
    if len(parts) > 1 and all(parts):
        return [part[1] or part[2] for part in parts if part]
    named, place = list[str](), 0
    while found := _LETTER_AND_WORDS.match(text, place):
        named.append(found[1] or found[2])
        option = one_line(dict(zip(LETTERS, options, strict=False)).get(named[-1].upper(), ""))
        words = re.escape(re.sub("[*`]", "", option).strip("\"'“”.!? "))
        if not words or not (own := re.compile(_ROUND + words + _ROUND, re.IGNORECASE).match(text, found.end())):
            return []
        if own.end() == len(text):
            return named
        if not (between := _BETWEEN.match(text, own.end())):
            return []
        place = between.end()
    return []
