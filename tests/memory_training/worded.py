"""A task whose rewards tell replies of random weights apart, with two rollouts of a role compared; as a script a run of
it, with replies that are functions of their prompts after --scripted.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from remind.core.cli import parse
from remind.memory_training import train, trainer
from remind.memory_training.config import TrainMemoryConfig
from remind.memory_training.episodes import Pair, Scores
from remind.memory_training.rewards import ROLES


class Words(train.MemBuilderTask):
    def score(self, row: int, outcomes: Any) -> Scores:
        rewards = {role: [float(len(set(one[n].split()))) for one in outcomes] for n, role in enumerate(ROLES)}
        return Scores(rewards, {"semantic": [4.0] * len(outcomes)}, (Pair("core", 0, 1, 0.5),))


def scripted(model: Any, prompts: Any, settings: Any) -> list[list[int]]:
    """A function of the prompt and of how often it was asked."""
    seen, replies = Counter[Any](), []
    for ids in map(tuple, prompts):
        seen[ids] += 1
        count = sum(ids) + seen[ids]
        replies.append([count * k % 200 + 2 for k in range(1, 2 + count % 4)] + [1])
    return replies


if __name__ == "__main__":
    if "--scripted" in sys.argv:
        sys.argv.remove("--scripted")
        trainer.complete = scripted  # type: ignore[assignment]
    train.train_memory(parse(TrainMemoryConfig, ""), Words)
