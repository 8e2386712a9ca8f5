"""MemBuilder's task: four roles write at once, questions on the session decide (Eq. 5-10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from random import Random
from typing import Any

from remind.memory.operations import Operation, State
from remind.memory_training.config import PolicyGradientConfig, RewardConfig
from remind.memory_training.episodes import Episode, Examined, Lesson, Prompt, Scores
from remind.memory_training.pico import remember, speech_of
from remind.memory_training.rewards import ROLES, attribution, core_length_penalty, length_penalty, role_reward


def written(operations: Sequence[Operation], length: Callable[[str], int]) -> int:
    """Tokens that a role's applied operations add to its store."""
    return sum(length(one.text) for one in operations if one.entry and one.status == "applied")


@dataclass(frozen=True)
class Result(Examined):
    """What the replies of one rollout are worth.

    Attributes:
        rewards: by role (Eq. 6).
        valid: by role, whether all its operations were applied.
    """

    rewards: dict[str, float]
    valid: dict[str, bool]


class Scorer:
    """Scores the replies to one lesson; what the expert wrote is worked out once.

    Args:
        length: of a text in tokens of the policy.
    """

    def __init__(self, lesson: Lesson, cfg: RewardConfig, length: Callable[[str], int]) -> None:
        self.lesson, self.cfg, self.length = lesson, cfg, length

    @cached_property
    def expert(self) -> dict[str, int]:
        """Tokens that the expert wrote, by role."""
        operations = self._remembered(self.lesson.replies)[1]
        return {role: written(own, self.length) for role, own in zip(ROLES, operations, strict=True)}

    def results(self, rollouts: Sequence[Sequence[str]]) -> list[Result]:
        """Of several rollouts, examined together: of each the replies of all roles, in the order of `ROLES`."""
        remembered = [self._remembered(replies) for replies in rollouts]
        examined = self.lesson.examined([state for state, _ in remembered])
        return [self._result(*both, one) for both, one in zip(remembered, examined, strict=True)]

    def _result(self, state: State, proposed: Sequence[Sequence[Operation]], examined: Examined) -> Result:
        cfg, result = self.cfg, Result(**vars(examined), rewards={}, valid={})
        now, before = (self.length(one.block.text) if one.block else 0 for one in (state, self.lesson.state))
        for role, own in zip(ROLES, proposed, strict=True):
            penalty = length_penalty(written(own, self.length), self.expert[role], cfg.free_below)
            if role == "core":
                penalty = core_length_penalty(now - before, cfg.core_free, cfg.core_full)
            result.valid[role] = all(one.status == "applied" for one in own)
            result.rewards[role] = role_reward(result.valid[role], examined.task, penalty, cfg.length_penalty)
        return result

    def _remembered(self, replies: Sequence[str]) -> tuple[State, list[list[Operation]]]:
        return remember(self.lesson.state, self.lesson.dialogue, list(zip(self.lesson.views, replies, strict=True)))


def _unasked(states: Sequence[State]) -> list[Examined]:
    """Of a session without a task reward."""
    return [Examined(1.0, None, ())] * len(states)


class MemBuilderTask:
    """Each row is a session with the memory that the expert had before it; a rollout asks all four roles at once."""

    def __init__(self, lessons: Sequence[Lesson], tokenizer: Any, cfg: RewardConfig, rl: PolicyGradientConfig) -> None:
        self.speech, self.alpha = speech_of(tokenizer), rl.alpha
        rows = [lesson for lesson in lessons if lesson.asks]
        # an independent draw of each session, which no other setting changes
        paid = [Random(f"density {row}").random() < rl.density for row in range(len(rows))]
        rows = [one if own else replace(one, asks=0, examined=_unasked) for one, own in zip(rows, paid, strict=True)]
        self.scorers = [Scorer(lesson, cfg, self.speech.length) for lesson in rows]

    def __len__(self) -> int:
        return len(self.scorers)

    def episode(self, row: int) -> Episode:
        """Prompts of all roles; returns their replies as text."""
        views = self.scorers[row].lesson.views
        replies = yield [Prompt(one.role, self.speech.prompt(one)) for one in views]
        return [self.speech.reply(one, reply) for one, reply in zip(views, replies, strict=True)]

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """Rewards by role, since each role is a group of its own, and the weights of Eq. 10."""
        results = self.scorers[row].results(outcomes)
        weights = [attribution(one.retrieved, self.alpha) for one in results]
        figures = {
            "task": [one.task for one in results if self.scorers[row].lesson.asks and not isnan(one.task)],
            "held_out": [one.held_out for one in results if one.held_out is not None],
            "valid": [sum(one.valid.values()) / len(ROLES) for one in results],
        }
        return Scores(
            {role: [one.rewards[role] for one in results] for role in ROLES},
            {role: [one[role] for one in weights] for role in ROLES},
            metrics={name: sum(values) / len(values) for name, values in figures.items() if values},
        )
