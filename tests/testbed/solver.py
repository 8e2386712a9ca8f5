"""A reader of the synthetic world that knows its words and its rule, and nothing of how a world is made.

It sees what a model sees, a rendered prompt, or the turns of a dialogue and a question. It finds out from the wording
what is asked of whom, counts cue words, and answers in the question's format.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

LETTERS = "ABCD"
Said = tuple[int, str, str, str]
"""Session (from 1), speaker, text, caption or ""."""


@cache
def bank() -> dict[str, Any]:
    return yaml.safe_load((files("remind.testbed") / "lexicon.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Remark:
    """One thing said that speaks for a value (of temporal dynamics: keen or averse)."""

    session: int
    cue: str
    value: str
    flagged: bool


@dataclass(frozen=True)
class Problem:
    """A question, and what is there to answer it from."""

    dimension: str
    speaker: str
    topic: str
    format: str
    options: tuple[str, ...]
    said: tuple[Said, ...]


@cache
def asks() -> list[tuple[str, re.Pattern[str]]]:
    """Every wording of a question: the dimension, and what finds it."""
    found = []
    for dimension, words in bank()["dimensions"].items():
        for text in words["ask"]:
            form = re.escape(text).replace(r"\{S\}", r"(?P<S>\w+)").replace(r"\{topic\}", r"(?P<topic>\w+)")
            found.append((dimension, re.compile(form)))
    return found


def understand(question: str) -> tuple[str, str, str]:
    """Dimension, speaker and topic ("" where there is none) of a question's wording; exactly one wording fits."""
    fits = [(dimension, m.groupdict()) for dimension, form in asks() if (m := form.fullmatch(question))]
    if len(fits) != 1:
        raise ValueError(f"{len(fits)} wordings fit {question!r}")
    dimension, slots = fits[0]
    return dimension, slots["S"], slots.get("topic", "")


def from_dialogue(dialogue: Any, question: Any, seen: Collection[str] | None = None) -> Problem:
    """A question, and everything that was said, or what was said in the turns whose ids are `seen`."""
    said = [
        (number, turn.speaker, turn.text, turn.images[0].caption if turn.images else "")
        for number, session in enumerate(dialogue.sessions, start=1)
        for turn in session.turns
        if seen is None or turn.id in seen
    ]
    dimension, speaker, topic = understand(question.text)
    return Problem(dimension, speaker, topic, question.format, tuple(question.options), tuple(said))


def problems(world: Any) -> list[tuple[Any, Problem]]:
    """Every question of a world with its problem."""
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    return [(item, from_dialogue(dialogues[item.question.dialogue_id], item.question)) for item in world.questions]


def from_prompt(prompt: str) -> Problem:
    """What a model is shown; markers and summary are skipped."""
    conversation = prompt.split("\nConversation\n")[1].split("\n\n")[0]
    said: list[Said] = []
    session = 0
    for line in conversation.splitlines():
        if m := re.fullmatch(r"\[Session (\d+)\]", line):
            session = int(m[1])
        elif m := re.fullmatch(r"\[Image #\d+ Caption\] (.*)", line):
            said[-1] = (*said[-1][:3], m[1])
        elif m := re.fullmatch(r"(\w+): (.*)", line):
            said.append((session, m[1], m[2], ""))
        elif line not in ("[…]", "[ATTENTION]"):
            raise ValueError(f"what is {line!r}?")
    question = re.findall(r"^Question: (.*)$", prompt, re.MULTILINE)[-1]
    options = (
        tuple(re.findall(r"^[A-D]\. (.*)$", prompt.split("\nOptions:\n")[1], re.MULTILINE))
        if ("\nOptions:\n" in prompt)
        else ()
    )
    kind = "direct" if not options else "multi" if "Pick every option" in prompt else "single"
    dimension, speaker, topic = understand(question)
    return Problem(dimension, speaker, topic, kind, options, tuple(said))


@cache
def _cues(dimension: str) -> tuple[dict[str, str], re.Pattern[str]]:
    words = bank()["dimensions"][dimension]
    if dimension == "temporal_dynamics":
        values = {cue: stance for stance in ("keen", "averse") for cue in words[stance]}
    else:
        values = {cue: value for value, entry in words["values"].items() for cue in entry["cues"]}
    return values, re.compile(rf"\b({'|'.join(map(re.escape, values))})\b")


def bare(text: str) -> str:
    """What is said after the word a remark may begin with."""
    for lead in (*bank()["leads"], bank()["flag"]):
        if text.startswith(f"{lead}, "):
            return text[len(lead) + 2 :]
    return text


def remarks(problem: Problem) -> list[Remark]:
    """What the speaker asked about said (or showed) to the point, in time order."""
    words = bank()["dimensions"][problem.dimension]
    values, cues = _cues(problem.dimension)
    found = []
    before = ""
    for session, speaker, text, caption in problem.said:
        source, told = caption if "texts" in words else text, [text]
        if problem.dimension == "implicit_boundary_modeling":
            # the cue stands in what somebody else asked just before
            source, told = before if bare(text) in words["dodges"] else "", [before, text]
        before = text
        if speaker != problem.speaker or (problem.topic and not re.search(rf"\b{problem.topic}\b", source)):
            continue
        flagged = any(line.startswith(f"{bank()['flag']}, ") for line in told)
        found += [Remark(session, cue, values[cue], flagged) for cue in cues.findall(source)]
    return found


def values_of(dimension: str) -> list[str]:
    return list(bank()["dimensions"][dimension]["values"])


def most(values: Iterable[str], rng: random.Random, among: Iterable[str]) -> str:
    """The most frequent of `among`; ties, and that of nothing, by chance."""
    counts = Counter(values)
    pool = list(among)
    top = max(counts[value] for value in pool)
    return rng.choice([value for value in pool if counts[value] == top])


def decide(problem: Problem, heard: list[Remark], rng: random.Random, sessions: int | None = None) -> str:
    """The value that the remarks speak for.

    Args:
        sessions: of the dialogue, where remarks of either half are to be counted by majority; None: the first remark
            tells how a course begins and the last one how it ends.
    """
    if problem.dimension != "temporal_dynamics":
        return most((remark.value for remark in heard), rng, values_of(problem.dimension))
    stances = ("keen", "averse")
    if sessions is None:
        course = [heard[0].value, heard[-1].value]
    else:
        late = [remark.session > sessions // 2 for remark in heard]
        course = [
            most((r.value for r, is_late in zip(heard, late, strict=True) if is_late == half), rng, stances)
            for half in (False, True)
        ]
    entries = bank()["dimensions"]["temporal_dynamics"]["values"]
    return next(value for value, entry in entries.items() if entry["phases"] == course)


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
    return answer(problem, decide(problem, heard, random.Random(0)))


def guess(problem: Problem, rng: random.Random, sessions: int) -> str | None:
    """The answer of one who counts every remark."""
    return answer(problem, decide(problem, remarks(problem), rng, sessions))
