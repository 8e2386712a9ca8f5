"""Solves questions of the synthetic world from what is said in them, on the words of the simulated LLM's reading.

It sees what a model sees, a rendered prompt, or the turns of a dialogue and a question. It finds out from the wording
what is asked of whom, counts cue words, and answers in the question's format.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from remind.testbed import reader
from remind.testbed.reader import Asked, Remark, Turn, asks, bare, turns_of
from remind.testbed.world import lexicon as bank

__all__ = ["asks", "bank", "bare"]
LETTERS = "ABCD"


@dataclass(frozen=True)
class Problem:
    """A question, and what is there to answer it from."""

    dimension: str
    speaker: str
    topic: str
    format: str
    options: tuple[str, ...]
    said: tuple[Turn, ...]


def understand(question: str) -> tuple[str, str, str]:
    """Dimension, speaker and topic ("" where there is none) of a question's wording; exactly one wording fits."""
    asked = reader.understand(question)
    return asked.dimension, asked.speaker, asked.topic


def from_dialogue(dialogue: Any, question: Any, seen: Collection[str] | None = None) -> Problem:
    """A question, and everything that was said, or what was said in the turns whose ids are `seen`."""
    said = [
        Turn(number, turn.speaker, turn.text, turn.images[0].caption if turn.images else "", False)
        for number, session in enumerate(dialogue.sessions, start=1)
        for turn in session.turns
        if seen is None or turn.id in seen
    ]
    return Problem(*understand(question.text), question.format, tuple(question.options), tuple(said))


def problems(world: Any) -> list[tuple[Any, Problem]]:
    """Every question of a world with its problem."""
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    return [(item, from_dialogue(dialogues[item.question.dialogue_id], item.question)) for item in world.questions]


def from_prompt(prompt: str) -> Problem:
    """What a model is shown; markers and summary are skipped."""
    said = turns_of(prompt.split("\nConversation\n")[1].split("\n\n")[0])
    question = re.findall(r"^Question: (.*)$", prompt, re.MULTILINE)[-1]
    options = (
        tuple(re.findall(r"^[A-D]\. (.*)$", prompt.split("\nOptions:\n")[1], re.MULTILINE))
        if ("\nOptions:\n" in prompt)
        else ()
    )
    kind = "direct" if not options else "multi" if "Pick every option" in prompt else "single"
    return Problem(*understand(question), kind, options, tuple(said))


def remarks(problem: Problem) -> list[Remark]:
    """What the speaker asked about said (or showed) to the point, in time order."""
    return reader.remarks(Asked(problem.dimension, problem.speaker, problem.topic), problem.said)


def values_of(dimension: str) -> list[str]:
    return list(bank()["dimensions"][dimension]["values"])


def decide(problem: Problem, heard: list[Remark]) -> str:
    """The value that the remarks speak for; of a course the first tells how it begins and the last how it ends."""
    if problem.dimension != "temporal_dynamics":
        return heard[0].value
    entries = bank()["dimensions"]["temporal_dynamics"]["values"]
    return next(value for value, entry in entries.items() if entry["phases"] == [heard[0].value, heard[-1].value])


def answer(problem: Problem, value: str) -> str | None:
    """How a value is answered, as it stands between the answer tags; None where no option says it."""
    words = bank()["dimensions"][problem.dimension]
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
    heard = [remark for remark in remarks(problem) if not remark.flagged]
    if problem.dimension != "temporal_dynamics" and len({remark.value for remark in heard}) != 1:
        raise ValueError(f"{heard} does not settle {problem.dimension} of {problem.speaker}")
    return answer(problem, decide(problem, heard))
