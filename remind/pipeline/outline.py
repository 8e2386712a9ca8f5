"""The corpus of a build, read twice and never held: what splits need of all of it, then dialogue by dialogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from remind.core.errors import ConfigError, DataError, named
from remind.data.dialogue import Corpus, Dangling, Dialogue, Question, note_ids
from remind.data.readers import stream
from remind.data.split import Overlap, assign_splits, check_overlap
from remind.pipeline.config import BuildStatesConfig

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
        abstention: as in `FactualState`.
    """

    number: int
    dialogue: Dialogue
    questions: list[Question]
    splits: dict[str, str]
    work: float
    abstention: bool


@dataclass
class Outline:
    """What is kept of a corpus of any size: a few hundred bytes a question.

    Attributes:
        questions: without text, options and answers.
        work: sum of the `effort` of each dialogue with questions, in their order.
        splits: question id to split.
        overlap: gold evidence that training and test questions share.
        references, dangling: as in `Corpus`, of the questions that are built.
        abstention: whether prompts say what to answer where the conversation does not tell; see `BuildStatesConfig`.
    """

    questions: list[Question] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    splits: Mapping[str, str] = field(default_factory=dict)
    overlap: Overlap | None = None
    references: int = 0
    dangling: list[Dangling] = field(default_factory=list)
    abstention: bool = False


def outline(cfg: BuildStatesConfig) -> Outline:
    """Read everything once.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, ids that stand twice, evidence on both
            sides of a split that is not only to be reported. Names the path it came by.
        ConfigError: no questions.
    """
    # questions of one's own may well be such that the dialogue does not tell
    corpus = Outline(abstention=cfg.ask is not None)
    first: dict[tuple[str, str], str | Path] = {}
    limit = cfg.limit
    for path, piece in _stream(cfg):
        note_ids(piece, path, first)
        corpus.abstention |= any(question.unanswerable for question in piece.questions)
        corpus.questions += [replace(question, text="", options=(), answers=()) for question in piece.questions]
        built: set[str] = set()
        for dialogue, questions in piece.by_dialogue():
            if questions:
                corpus.work.append(sum(effort(dialogue, questions[:limit]).values()))
                built |= {question.id for question in questions[:limit]}
        corpus.references += sum(count for name, count in piece.referenced.items() if name in built)
        corpus.dangling += [item for item in piece.dangling if item.question_id in built]
    if not corpus.questions:
        raise ConfigError(f"{', '.join(cfg.inputs)}: holds dialogues but no questions; give some with --ask")
    if cfg.abstention is not None:
        corpus.abstention = cfg.abstention
    corpus.splits = assign_splits(corpus.questions, cfg.split)
    corpus.overlap = check_overlap(
        ((q.id, q.dialogue_id, corpus.splits[q.id], (*q.evidence, *q.images)) for q in corpus.questions),
        lambda dialogue_id: first["dialogue", dialogue_id],
        cfg.split.overlap == "report",
    )
    return corpus


def tasks(cfg: BuildStatesConfig, corpus: Outline) -> Iterator[Task]:
    """Read everything again, one dialogue in memory at a time.

    Raises:
        DataError: the input has changed since it was outlined.
    """
    number, parts = 0, len(corpus.work)
    for _, piece in _stream(cfg):
        for dialogue, questions in piece.by_dialogue():
            if not questions:
                continue
            chosen = questions[: cfg.limit]
            if number >= parts or any(question.id not in corpus.splits for question in chosen):
                raise DataError("the input has changed while it was read; start again", record=named(dialogue.id))
            splits = {question.id: corpus.splits[question.id] for question in chosen}
            yield Task(number, dialogue, chosen, splits, corpus.work[number], corpus.abstention)
            number += 1
    if number < parts:
        raise DataError(f"the input has changed while it was read: {parts - number} dialogues are missing")


def _stream(cfg: BuildStatesConfig) -> Iterator[tuple[str, Corpus]]:
    for path in cfg.inputs:
        for corpus in stream(path, cfg.format):
            yield path, corpus if cfg.ask is None else asked(corpus, cfg.ask)


def asked(corpus: Corpus, texts: Sequence[str]) -> Corpus:
    """The dialogues, each with the same questions, which nobody has answered."""
    return Corpus(
        corpus.dialogues,
        tuple(
            Question(f"{dialogue.id}-ask{number}", dialogue.id, text.strip(), split="test")
            for dialogue in corpus.dialogues
            for number, text in enumerate(texts, start=1)
        ),
    )
