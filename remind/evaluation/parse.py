"""Reading `<answer>…</answer><explanation>…</explanation>` (Tables 9-11) from whatever a model wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from remind.states.pyramid import one_line
from remind.text.letters import letters_in
from remind.text.thoughts import without_thoughts

_TAG = re.compile(r"<\s*(/?)\s*(answer|explanation)\s*>", re.IGNORECASE)
_BULLET = re.compile(r"^[-*•]\s+")
#: Longer digit runs are no image number; Python also refuses to convert very long ones.
_INTEGER = re.compile(r"(?<![\w.+-])\d{1,9}(?!\w|\.\d)", re.ASCII)
_LIST = re.compile(r"\s*\[[\d\s,]*\]\s*", re.ASCII)


@dataclass(frozen=True)
class ParsedAnswer:
    """What an output says.

    Attributes:
        answer: the text between the answer tags on one line; "" if there is none.
        letters: the option letters in it, in capitals; empty for direct questions.
        evidence: the lines of the explanation; empty for visual questions.
        images: the image indices of the explanation; empty for others.
        readable: False where the answer is empty, or options were to be chosen from and it names no letter, not even an
            empty set; words that several options share name none.
        problems: departures from the asked form, each one of a fixed set of phrases so that they can be counted.
    """

    answer: str
    letters: frozenset[str] = frozenset()
    evidence: tuple[str, ...] = ()
    images: frozenset[int] = frozenset()
    problems: tuple[str, ...] = ()
    readable: bool = True


def _section(text: str, name: str, problems: list[str]) -> str | None:
    """The first complete <name>…</name>; else from the first <name> to the next tag or the end; else None."""
    tags = list(_TAG.finditer(text))
    kinds = [tag[1] + tag[2].lower() for tag in tags]
    opened = [number for number, kind in enumerate(kinds) if kind == name]
    complete = [number for number in opened if kinds[number + 1 : number + 2] == [f"/{name}"]]
    if not opened:
        return None
    if len(complete) != 1:
        problems.append(f"several {name} tags" if complete else f"{name} tag not closed")
    first = (complete or opened)[0]
    return text[tags[first].end() : tags[first + 1].start() if first + 1 < len(tags) else len(text)]


def _images(explanation: str, problems: list[str]) -> frozenset[int]:
    if explanation.strip() and not _LIST.fullmatch(explanation):
        problems.append("images not a JSON list")
    return frozenset(map(int, _INTEGER.findall(explanation)))


def parse_answer(
    output: str, format: str = "direct", options: Sequence[str] = (), visual: bool = False
) -> ParsedAnswer:
    """Read one output without its thoughts; never raises on any text.

    An answer without tags is the text before the explanation. Of several complete answers the first
    counts. The same holds for the explanation, except that without its tag there is none.

    Args:
        format: "single", "multi" or "direct".
        options: the option texts; their number decides which letters exist.
        visual: whether the explanation holds image indices rather than dialogue lines.
    """
    output = without_thoughts(output)
    problems: list[str] = []
    answer = _section(output, "answer", problems)
    if answer is None:
        answer = re.split(r"<\s*explanation\s*>", output, maxsplit=1, flags=re.IGNORECASE)[0]
        problems.append("no answer tag")
    answer = one_line(_TAG.sub(" ", answer))
    if not answer:
        problems.append("empty answer")
    letters: frozenset[str] = frozenset()
    if format != "direct":
        letters = letters_in(answer, options, problems)
        if format == "single" and len(letters) > 1:
            problems.append("several letters for one option")

    explanation = _section(output, "explanation", problems)
    if explanation is None:
        problems.append("no explanation tag")
        explanation = ""
    readable = not {"empty answer", "no option letter"} & set(problems)
    if visual:
        return ParsedAnswer(answer, letters, (), _images(explanation, problems), tuple(problems), readable)
    lines = (_BULLET.sub("", line.strip()).strip() for line in explanation.splitlines())
    evidence = tuple(line for line in lines if line)
    return ParsedAnswer(answer, letters, evidence, frozenset(), tuple(problems), readable)
