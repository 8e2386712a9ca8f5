"""Accuracy on questions of the world: greedy answers under each level, also measured on the way of a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from remind.alignment.config import TrainConfig
from remind.alignment.trainer import Trainer
from remind.core.errors import ConfigError, DataError
from remind.evaluation import metrics
from remind.evaluation.parse import parse_answer
from remind.models.backbone import Backbone
from remind.models.generate import Generation, generate
from remind.models.load import load_backbone
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS

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


class MonitoredTrainer(Trainer):
    """A trainer that calls `probe(self)` before the first step, after every `every` steps and after the last.

    The steps are those of a run without it. `every` 0: never called.
    """

    def __init__(self, cfg: TrainConfig, probe: Callable[[MonitoredTrainer], None], every: int) -> None:
        self.probe, self.probe_every, self._probed = probe, every, -1
        super().__init__(cfg)

    def _evaluate_if_due(self) -> None:
        super()._evaluate_if_due()
        due = self.probe_every and (self.step % self.probe_every == 0 or self.step == self.parts.total)
        if due and self._probed < self.step and not self.stopped:
            self._probed = self.step
            self.probe(self)


def train_with_accuracy(cfg: TrainConfig, records: Sequence[StateRecord], every: int) -> Path:
    """As `remind.alignment.trainer.train`, on one process, with rows of kind `accuracy` in metrics.jsonl.

    Before the first step, after every so many and after the last, the questions are answered from x0, x1 and x2; a row
    has the accuracy under each.

    Args:
        records: questions with gold answers that the run does not train on.
        every: steps between two measurements.

    Returns:
        The run folder.

    Raises:
        ConfigError: no questions, or every below 1.
        As `train` does.
    """
    if not records or every < 1:
        raise ConfigError("accuracy needs questions, and every must be at least 1")
    base = load_backbone(cfg.model, dtype=cfg.dtype)

    def measure(trainer: MonitoredTrainer) -> None:
        backbone = replace(base, model=trainer.model)
        correct = {level: correct_answers(backbone, records, level) for level in LEVELS}
        row = {level: sum(hits) / len(hits) for level, hits in correct.items()}
        trainer.folder.record({"step": trainer.step, "kind": "accuracy", "questions": len(records), **row})

    trainer = MonitoredTrainer(cfg, measure, every)
    try:
        trainer.fit()
    finally:
        trainer.folder.close()
    trainer.finish()
    return trainer.folder.path
