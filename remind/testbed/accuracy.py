"""Accuracy on questions of the world: greedy answers under each level, also measured on the way of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from remind.alignment.callbacks import Probe
from remind.core.errors import ConfigError, DataError
from remind.evaluation import metrics
from remind.evaluation.parse import parse_answer
from remind.models.backbone import Backbone
from remind.models.generate import Generation, generate
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord

#: Answers of the world are shorter; the nano backbone quotes no evidence after them.
MAX_NEW_TOKENS = 12


def correct_answers(
    backbone: Backbone,
    records: Sequence[StateRecord],
    level: str,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 64,
) -> list[bool]:
    """Whether each question is answered correctly from a level.

    Raises:
        DataError: a question without a gold answer.
        ModelError: a model that does not generate.
    """
    outputs = generate(backbone, [record.level(level).text for record in records], max_new_tokens, batch_size)
    return [is_correct(record, output) for record, output in zip(records, outputs, strict=True)]


def is_correct(record: StateRecord, output: Generation | None) -> bool:
    """Whether an output gives an acceptable answer, word for word but for case, or exactly the right letters.

    Raises:
        DataError: the question has no gold answer.
    """
    if not record.answers:
        raise DataError("has no gold answer to be measured by", record=record.question_id)
    if output is None or output.failure is not None:
        return False
    parsed = parse_answer(output.text, record.format, record.options, record.visual)
    if record.format == "direct":
        return parsed.answer.strip().casefold() in {answer.casefold() for answer in record.answers}
    return metrics.accuracy(set(parsed.letters), set(record.answers)) == 1


def accuracy_probe(backbone: Backbone, records: Sequence[StateRecord], steps: int) -> Probe:
    """A callback of training: rows of kind `accuracy` in metrics.jsonl, with the accuracy under x0, x1 and x2.

    Args:
        backbone: the base model, for its tokenizer.
        records: questions with gold answers that the run does not train on.
        steps: between two measurements; the first is before training, the last after it.

    Raises:
        ConfigError: no questions, or steps below 1.
    """
    if not records or steps < 1:
        raise ConfigError("accuracy needs questions, and steps must be at least 1")

    def measure(model: Any) -> dict[str, float]:
        answering = replace(backbone, model=model)
        return {level: sum(correct_answers(answering, records, level)) / len(records) for level in LEVELS}

    return Probe(measure, steps, kind="accuracy")
