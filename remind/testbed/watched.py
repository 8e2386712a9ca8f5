"""A training run that answers questions on its way, so that its trajectory shows accuracy beside losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from remind.alignment.trainer import TrainConfig, Trainer
from remind.core.errors import ConfigError
from remind.models.load import load_backbone
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS
from remind.testbed.score import MAX_NEW_TOKENS, answered


def train_watched(
    cfg: TrainConfig, records: Sequence[StateRecord], every: int, max_new_tokens: int = MAX_NEW_TOKENS
) -> Path:
    """As `remind.alignment.trainer.train`, on one process, with rows of kind `accuracy` in metrics.jsonl.

    Before the first step, after every so many and after the last, the questions are answered from x0, x1 and x2; the
    row has the share of right answers under each. The steps themselves are those of a run that is not watched.

    Args:
        records: questions with gold answers that the run does not train on.
        every: steps between two measurements.

    Returns:
        The run folder.

    Raises:
        ConfigError: nothing to ask, or never.
        As `train` does.
    """
    if not records or every < 1:
        raise ConfigError("to watch a run takes questions, and every of 1 or more")
    base = load_backbone(cfg.model, dtype=cfg.dtype)

    class Watched(Trainer):
        looked = -1

        def _evaluate_if_due(self) -> None:
            super()._evaluate_if_due()
            due = self.step % every == 0 or self.step == self.parts.total
            if not due or self.looked == self.step or self.stopped:
                return
            self.looked = self.step
            model = self.workers.model
            learned = replace(base, model=model)
            right = {level: answered(learned, records, level, max_new_tokens) for level in LEVELS}
            row = {level: sum(hits) / len(hits) for level, hits in right.items()}
            self.folder.record({"step": self.step, "kind": "accuracy", "questions": len(records), **row})

    trainer = Watched(cfg)
    try:
        trainer.fit()
    finally:
        trainer.folder.close()
    trainer.finish()
    return trainer.folder.path
