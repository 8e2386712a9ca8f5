"""Solves questions of the synthetic world from what is said in them, on the words of the simulated LLM's reading.

It sees what a model sees, a rendered prompt, or the turns of a dialogue and a question. It finds out from the wording
what is asked of whom, counts cue words, and answers in the question's format.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from remind.testbed import reader
from remind.testbed.reader import Asked, Remark, Turn, turns_of, understand

LETTERS = "ABCD"


@dataclass(frozen=True)
class Problem:
    """A question, and what is there to answer it from."""

    asked: Asked
    format: str
    options: tuple[str, ...]
    said: tuple[Turn, ...] = ()


def from_dialogue(dialogue: Any, question: Any, seen: Collection[str] | None = None) -> Problem:
    """A question, and everything that was said, or what was said in the turns whose ids are `seen`."""
    said = [
        Turn(number, turn.speaker, turn.text, turn.images[0].caption if turn.images else "", False)
        for number, session in enumerate(dialogue.sessions, start=1)
        for turn in session.turns
        if seen is None or turn.id in seen
    ]
    return Problem(understand(question.text), question.format, tuple(question.options), tuple(said))


def problems(world: Any) -> list[tuple[Any, Problem]]:
    """Every question of a world with its problem."""
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    return [(item, from_dialogue(dialogues[item.question.dialogue_id], item.question)) for item in world.questions]


def from_prompt(prompt: str) -> Problem:
    """What a model is shown; markers and summary are skipped."""
    said = turns_of(prompt.split("\nConversation\n")[1].split("\n\n")[0])
    question = re.findall(r"^Question: (.*)$", prompt, re.MULTILINE)[-1]
    options = tuple(re.findall(r"^[A-D]\. (.*)$", prompt.partition("\nOptions:\n")[2], re.MULTILINE))
    kind = "direct" if not options else "multi" if "Choose every letter" in prompt else "single"
    return Problem(understand(question), kind, options, tuple(said))


def remarks(problem: Problem) -> list[Remark]:
    """What the speaker asked about said (or showed) to the point, in time order."""
    return reader.remarks(problem.asked, problem.said)


def answer(problem: Problem, value: str) -> str | None:
    """How a value is answered, as it stands between the answer tags; None where no option says it."""
    words = problem.asked.words
    entry = words["values"][value]
    if problem.format == "direct":
        return entry["label"][0]
    if problem.format == "single":
        letters = [letter for letter, text in zip(LETTERS, problem.options, strict=True) if text in entry["label"]]
        return letters[0] if len(letters) == 1 else None
    right = {text for text, of in words["fits"].items() if value in of} if "fits" in words else set(entry["fits"])
    letters = [letter for letter, text in zip(LETTERS, problem.options, strict=True) if text in right]
    return f"[{','.join(letters)}]" if letters else None


def solve(problem: Problem) -> str | None:
    """The answer of one who leaves flagged remarks out; raises where what is left does not settle it."""
    asked, heard = problem.asked, [remark for remark in remarks(problem) if not remark.flagged]
    if asked.dimension != reader.TEMPORAL and len({remark.value for remark in heard}) != 1:
        raise ValueError(f"{heard} does not settle {asked}")
    return answer(problem, reader.decide(asked, heard, random.Random(0)))
