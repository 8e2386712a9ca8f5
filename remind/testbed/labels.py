"""Labels of the training questions: wrong ones, few, or in other words. Those of dev and test stay as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remind.core.errors import ConfigError
from remind.data.dialogue import Question
from remind.testbed.lexicon import lexicon, statements
from remind.testbed.world import Trait, WorldQuestion
from sae.ranges import NonNegativeInt, Seed, Share, check_ranges


@dataclass
class LabelConfig:
    """Labels of the training questions. Choices are nested: fewer labels are some of more, less noise some of more."""

    noise: Share = 0.0
    """Share of the labelled training questions whose label is that of another value."""
    labelled: NonNegativeInt | None = None
    """Training questions that keep their label; None: all."""
    pool: bool = True
    """Keep the training questions without a label, for `data.unlabelled`; otherwise they are left out."""
    paraphrased: bool = False
    """Training labels of direct questions in other acceptable words than the first ones."""
    seed: Seed = 0
    """Which questions lose their label or get a wrong one."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def with_labels(questions: Sequence[WorldQuestion], config: LabelConfig) -> list[WorldQuestion]:
    """The questions in order, those of split train with the labels of `config`; without a pool some are missing."""
    train = [item.question.id for item in questions if item.question.split == "train"]
    order = random.Random(f"remind-scarce:{config.seed}").sample(train, len(train))
    labelled = set(order[: config.labelled])
    result = []
    for item in questions:
        if item.question.split != "train":
            result.append(item)
        elif item.question.id in labelled:
            result.append(replace(item, question=_labelled(item, config)))
        elif config.pool:
            result.append(replace(item, question=replace(item.question, answers=())))
    return result


def _labelled(item: WorldQuestion, config: LabelConfig) -> Question:
    question = item.question
    rng = random.Random(f"remind-noise:{config.seed}:{question.id}")
    if rng.random() < config.noise:
        return replace(question, answers=wrong_answers(question, item.trait, rng))
    if config.paraphrased and question.format == "direct":
        first = rng.choice(question.answers[1:])
        return replace(question, answers=(first, *(form for form in question.answers if form != first)))
    return question


def wrong_answers(question: Question, trait: Trait, rng: random.Random) -> tuple[str, ...]:
    """The answer that follows from another value of the trait, where that is another answer than the right one."""
    values = lexicon()["dimensions"][trait.dimension]["values"]
    others = [value for value in values if value != trait.value]
    if question.format == "direct":
        return tuple(values[rng.choice(others)]["label"])
    if question.format == "single":
        return (rng.choice([letter for letter in "ABCD"[: len(question.options)] if letter not in question.answers]),)
    fits = statements(trait.dimension)
    answers = {
        tuple(letter for letter, text in zip("ABCD", question.options, strict=True) if other in fits[text])
        for other in others
    }
    # a value that fits none of the options gives no label
    return rng.choice(sorted(answer for answer in answers if answer and answer != question.answers))
