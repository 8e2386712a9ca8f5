"""What training is told of the answers: wrong labels, few labels, other words; dev and test stay as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remind.core.errors import ConfigError
from remind.data.dialogue import Question
from remind.testbed.world import Asked, Trait, lexicon, statements


@dataclass
class LabelConfig:
    """Labels of the training questions. Choices are nested: fewer labels are some of more, less noise some of more."""

    noise: float = 0.0
    """Share of the labelled training questions whose label is that of another value."""
    labelled: int | None = None
    """Training questions that keep their label; None: all."""
    pool: bool = True
    """Keep the training questions without a label, for `data.unlabelled`; otherwise they are left out."""
    paraphrased: bool = False
    """Training labels of direct questions in other acceptable words than the first ones."""
    seed: int = 0
    """Which questions lose their label or get a wrong one."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"noise is {self.noise}; it is a share, from 0 to 1")
        if self.labelled is not None and self.labelled < 0:
            raise ConfigError(f"labelled is {self.labelled}; it must be 0 or more")


def told(asked: Sequence[Asked], config: LabelConfig) -> list[Question]:
    """The questions as training is told of them, in order; those left out are missing. Only split train changes."""
    train = [item.question.id for item in asked if item.question.split == "train"]
    order = random.Random(f"remind-scarce:{config.seed}").sample(train, len(train))
    kept = set(order[: config.labelled])
    questions = []
    for item in asked:
        question = item.question
        if question.split == "train":
            if question.id not in kept:
                if not config.pool:
                    continue
                question = replace(question, answers=())
            else:
                question = _label(item, config)
        questions.append(question)
    return questions


def _label(item: Asked, config: LabelConfig) -> Question:
    question, trait = item.question, item.trait
    rng = random.Random(f"remind-noise:{config.seed}:{question.id}")
    if rng.random() < config.noise:
        return replace(question, answers=wrong_answers(question, trait, rng))
    if config.paraphrased and question.format == "direct":
        others = question.answers[1:]
        first = rng.choice(others)
        return replace(question, answers=(first, *(form for form in question.answers if form != first)))
    return question


def wrong_answers(question: Question, trait: Trait, rng: random.Random) -> tuple[str, ...]:
    """The answer somebody gives who takes the speaker for another value, one that leads to another answer."""
    values = lexicon()["dimensions"][trait.dimension]["values"]
    others = [value for value in values if value != trait.value]
    if question.format == "direct":
        return tuple(values[rng.choice(others)]["label"])
    if question.format == "single":
        return (rng.choice([letter for letter in "ABCD"[: len(question.options)] if letter not in question.answers]),)
    fits = statements(trait.dimension)
    found = {
        tuple(letter for letter, text in zip("ABCD", question.options, strict=True) if other in fits[text])
        for other in others
    }
    # a value none of the options goes with has no label to give
    return rng.choice(sorted(answers for answers in found if answers and answers != question.answers))
