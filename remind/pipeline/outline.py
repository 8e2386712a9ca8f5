"""The corpus of a build, read twice and never held: what splits need of all of it, then dialogue by dialogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from remind.core.errors import ConfigError, DataError, named
from remind.data.dialogue import Corpus, Dangling, Dialogue, Question, note_ids
from remind.data.readers import stream
from remind.data.split import SplitConfig, assign_splits, check_overlap

#: The stages of a dialogue whose time is measured, in order.
STAGES = ("segments", "cues", "retrieval", "codes", "grounding", "summaries", "states")


def effort(dialogue: Dialogue, questions: Sequence[Question]) -> dict[str, float]:
    """Units of work of each stage.

    Their ratios are those of the default settings on a CPU. Other models shift them, and with them the ETA within a
    dialogue; over several dialogues that evens out.
    """
    turns, count = len(dialogue.turns), len(questions)
    kinds = len({question.dimension for question in questions})
    return {
        "segments": 4.0 * turns,
        "cues": 3.0 * turns * kinds,
        "retrieval": 6.0 * count,
        "codes": 3.0 * turns,
        "grounding": 12.0 * count,
        "summaries": 1.0 * count,
        "states": 1.0 * count,
    }


class Task(NamedTuple):
    """A dialogue and what is asked about it: one part of the states.

    Attributes:
        number: of the part, from 0.
        splits: question id to split.
        work: sum of its `effort`.
    """

    number: int
    dialogue: Dialogue
    questions: list[Question]
    splits: dict[str, str]
    work: float


@dataclass
class Outline:
    """What is kept of a corpus of any size: a few hundred bytes a question.

    Attributes:
        questions: without text, options and answers.
        parts: dialogues with questions. work: sum of the `effort` of each, in their order.
        splits: question id to split.
        references, dangling: as in `Corpus`, of the questions that are built.
    """

    questions: list[Question] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    splits: Mapping[str, str] = field(default_factory=dict)
    references: int = 0
    dangling: list[Dangling] = field(default_factory=list)

    @property
    def parts(self) -> int:
        return len(self.work)


def outline(paths: Sequence[str | Path], format: str | None, split: SplitConfig, limit: int | None) -> Outline:
    """Read everything once.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, ids that stand twice, evidence on both
            sides of a split. Names the path it came by.
        ConfigError: no questions.
    """
    found = Outline()
    first: dict[tuple[str, str], str | Path] = {}
    for path, corpus in _stream(paths, format):
        note_ids(corpus, path, first)
        found.questions += [replace(question, text="", options=(), answers=()) for question in corpus.questions]
        built: set[str] = set()
        for dialogue, questions in corpus.by_dialogue():
            if questions:
                found.work.append(sum(effort(dialogue, questions[:limit]).values()))
                built |= {question.id for question in questions[:limit]}
        found.references += sum(count for name, count in corpus.referenced.items() if name in built)
        found.dangling += [item for item in corpus.dangling if item.question_id in built]
    if not found.questions:
        raise ConfigError(f"{', '.join(map(str, paths))}: holds dialogues but no questions; states are of questions")
    found.splits = assign_splits(found.questions, split)
    check_overlap(
        ((q.id, q.dialogue_id, found.splits[q.id], (*q.evidence, *q.images)) for q in found.questions),
        lambda dialogue_id: first["dialogue", dialogue_id],
    )
    return found


def tasks(paths: Sequence[str | Path], format: str | None, limit: int | None, known: Outline) -> Iterator[Task]:
    """Read everything again, one dialogue in memory at a time.

    Raises:
        DataError: the input has changed since it was outlined.
    """
    number = 0
    for _, corpus in _stream(paths, format):
        for dialogue, questions in corpus.by_dialogue():
            if not questions:
                continue
            chosen = questions[:limit]
            if number >= known.parts or any(question.id not in known.splits for question in chosen):
                raise DataError("the input has changed while it was read; start again", record=named(dialogue.id))
            splits = {question.id: known.splits[question.id] for question in chosen}
            yield Task(number, dialogue, chosen, splits, known.work[number])
            number += 1
    if number < known.parts:
        raise DataError(f"the input has changed while it was read: {known.parts - number} dialogues are gone")


def _stream(paths: Sequence[str | Path], format: str | None) -> Iterator[tuple[str | Path, Corpus]]:
    for path in paths:
        for corpus in stream(path, format):
            yield path, corpus
