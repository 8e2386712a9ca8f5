"""Train, dev and test splits by evidence cluster or by dialogue, so that no gold evidence is shared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remind.core.errors import ConfigError, DataError, named
from remind.data.dialogue import Question
from sae.ranges import Seed, Share, check_ranges


@dataclass
class SplitConfig:
    """How questions without a split of their own are divided."""

    by: Literal["auto", "dialogue", "evidence"] = "auto"
    """Unit that is never divided: a dialogue, or an evidence cluster (questions linked by shared gold evidence turns or
    images). auto: dialogues if at least two have questions, else evidence clusters."""
    train: Share = 0.2
    """Share of the questions for training (Section 3 divides 2:8)."""
    dev: Share = 0.1
    """Share for choosing settings and checkpoints; the rest is the test split."""
    seed: Seed = 0
    """Order in which the units are assigned."""
    overlap: Literal["refuse", "report"] = "refuse"
    """Gold evidence that training and test questions share, as the input's own split may have it: refuse: an error;
    report: it is counted in the manifest, and told whenever the states are read."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.train + self.dev > 1:
            raise ConfigError(f"split: train {self.train} and dev {self.dev} must add up to at most 1")


def units_of(questions: Sequence[Question], by: str) -> list[list[Question]]:
    """Questions that must stay together: those about one dialogue ("dialogue"), or those linked by shared gold evidence
    ("evidence": connected components; one without evidence is a unit by itself)."""
    from scipy.cluster.hierarchy import DisjointSet  # type: ignore[import-untyped]

    together = DisjointSet(range(len(questions)))
    owner: dict[tuple[str, str | int], int] = {}
    for number, question in enumerate(questions):
        pieces: tuple[str | int, ...] = ("",) if by == "dialogue" else (*question.evidence, *question.images)
        for piece in pieces:
            together.merge(number, owner.setdefault((question.dialogue_id, piece), number))
    return [[questions[number] for number in sorted(unit)] for unit in together.subsets()]


def assign_splits(questions: Sequence[Question], config: SplitConfig) -> dict[str, str]:
    """Question id to "train", "dev" or "test". A split given by the benchmark is kept.

    Units are taken in an order that depends only on their ids and the seed: the first fill train, the next dev, the
    rest is test. A unit goes to train (dev) while that brings its share closer to the configured one. Of two or more
    units at least one is for training and one for testing.
    """
    splits = {question.id: question.split for question in questions if question.split is not None}
    free = [question for question in questions if question.split is None]
    by = config.by
    if by == "auto":
        by = "dialogue" if len({question.dialogue_id for question in free}) > 1 else "evidence"
    units = units_of(free, by)
    names = [f"{config.seed}:{min(question.id for question in unit)}" for unit in units]
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    units = [units[number] for number in sorted(range(len(units)), key=hashes.__getitem__)]
    cursor = 0
    for name, share in (("train", config.train), ("dev", config.dev)):
        wanted, taken = share * len(free), 0
        needed = name == "train" and share > 0 and len(units) > 1
        # the last unit is kept for the test split unless that is configured to be empty
        spare = 1 if config.train + config.dev < 1 else 0
        while cursor < len(units) - spare and wanted > 0:
            size = len(units[cursor])
            if not (needed and taken == 0) and abs(taken + size - wanted) >= abs(taken - wanted):
                break
            splits.update({question.id: name for question in units[cursor]})
            taken += size
            cursor += 1
    for unit in units[cursor:]:
        splits.update({question.id: "test" for question in unit})
    return splits


@dataclass(frozen=True, slots=True)
class Overlap:
    """Gold evidence that training and test questions share.

    Attributes:
        pieces: number of turns and images. questions: number of test questions with such a piece.
        first: the first such piece of the test questions, "turn t3" or "image 3". dialogue_id: its dialogue.
        train, test: the first question of each side that it belongs to.
    """

    pieces: int
    questions: int
    first: str
    dialogue_id: str
    train: str
    test: str

    def __str__(self) -> str:
        return (
            f"{self.first} of {named(self.dialogue_id)} is evidence of training question {named(self.train)} too, the "
            f"first of {self.pieces} shared, which {self.questions} test questions rest on"
        )


def check_overlap(
    questions: Iterable[tuple[str, str, str, Sequence[str | int]]],
    file_of: Callable[[str], str | Path | None] = lambda _: None,
    report: bool = False,
) -> Overlap | None:
    """Gold evidence that is shared by training and test questions, if any.

    Args:
        questions: (question id, dialogue id, split, gold evidence turn ids and image indices) of each.
        file_of: file or folder of a dialogue, for the error.
        report: it is not refused.

    Raises:
        DataError: there is some and it is not to be reported; names the first piece and the number of pieces.
    """
    sides: dict[str, dict[tuple[str, str | int], list[str]]] = {"train": {}, "test": {}}
    for question_id, dialogue_id, split, evidence in questions:
        if split in sides:
            for piece in evidence:
                sides[split].setdefault((dialogue_id, piece), []).append(question_id)
    train, test = sides.values()
    shared = [key for key in test if key in train]
    if not shared:
        return None
    dialogue_id, piece = shared[0]
    overlap = Overlap(
        pieces=len(shared),
        questions=len({question_id for key in shared for question_id in test[key]}),
        first=f"image {piece}" if isinstance(piece, int) else f"turn {named(piece)}",
        dialogue_id=dialogue_id,
        train=train[shared[0]][0],
        test=test[shared[0]][0],
    )
    if report:
        return overlap
    remedy = "split by evidence cluster or by dialogue, or build the states with --split.overlap report"
    raise DataError(f"{overlap}; {remedy}", file_of(overlap.dialogue_id), named(overlap.test))
