"""MemBuilder's task in the memory world: four roles write at once, questions on the session decide (Eq. 5-10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from remind.memory.operations import Operation, State
from remind.memory_training.config import RewardConfig
from remind.memory_training.episodes import Episode, Prompt, Scores
from remind.memory_training.pico import Lesson, remember
from remind.memory_training.rewards import (
    ROLES,
    LengthTolerance,
    attribution,
    core_length_penalty,
    length_penalty,
    role_reward,
    task_reward,
)
from remind.memory_training.speech import speech_of, word_count
from remind.testbed.memory_world import Ask, read


def written(operations: Sequence[Operation], length: Callable[[str], int]) -> int:
    """Tokens that a role's applied operations add to its store."""
    return sum(length(one.text) for one in operations if one.entry and one.status == "applied")


@dataclass(frozen=True)
class Result:
    """What the replies of one rollout are worth.

    Attributes:
        rewards: by role (Eq. 6).
        task: share of the rewarded questions that were answered right (Eq. 5).
        held_out: the same of the questions that are never rewarded.
        valid: by role, whether all its operations were applied.
        retrieved: the role of every entry that was retrieved for a rewarded question.
    """

    rewards: dict[str, float]
    task: float
    held_out: float
    valid: dict[str, bool]
    retrieved: tuple[str, ...]


class Scorer:
    """Scores the replies to one lesson; what the expert wrote is worked out once.

    Args:
        length: of a text in tokens of the policy; pico's are words.
    """

    def __init__(self, lesson: Lesson, cfg: RewardConfig, length: Callable[[str], int] = word_count) -> None:
        self.lesson, self.cfg, self.length = lesson, cfg, length
        self.tolerance = LengthTolerance(cfg.free_below, cfg.low, cfg.high, cfg.least, cfg.most)

    @cached_property
    def expert(self) -> dict[str, int]:
        """Tokens that the expert wrote, by role."""
        operations = self._remembered(self.lesson.replies)[1]
        return {role: written(own, self.length) for role, own in zip(ROLES, operations, strict=True)}

    def result(self, replies: Sequence[str]) -> Result:
        """Of the replies of all roles, in the order of `ROLES`."""
        lesson, before = self.lesson, self._core_length(self.lesson.state)
        state, proposed = self._remembered(replies)
        operations = dict(zip(ROLES, proposed, strict=True))
        valid = {role: all(one.status == "applied" for one in own) for role, own in operations.items()}
        readings = read(state, lesson.meeting.rewarded)
        task = task_reward(_right(lesson.meeting.rewarded, [one.answer for one in readings]))
        other = _right(lesson.meeting.held_out, [one.answer for one in read(state, lesson.meeting.held_out)])
        penalties = {
            role: length_penalty(written(own, self.length), self.expert[role], self.tolerance)
            for role, own in operations.items()
        }
        grown = self._core_length(state) - before
        penalties["core"] = core_length_penalty(grown, self.cfg.core_free, self.cfg.core_full)
        rewards = {role: role_reward(valid[role], task, penalties[role], self.cfg.length_penalty) for role in ROLES}
        retrieved = tuple(store for one in readings for store in one.retrieved)
        return Result(rewards, task, task_reward(other or [False]), valid, retrieved)

    def _remembered(self, replies: Sequence[str]) -> tuple[State, list[list[Operation]]]:
        return remember(self.lesson.state, self.lesson.life.id, list(zip(self.lesson.views, replies, strict=True)))

    def _core_length(self, state: State) -> int:
        return self.length(state.block.text) if state.block else 0


def _right(asks: Sequence[Ask], answers: Sequence[str]) -> list[bool]:
    return [ask.answer == answer for ask, answer in zip(asks, answers, strict=True)]


class MemBuilderTask:
    """Each row is a session with the memory that the expert had before it; a rollout asks all four roles at once."""

    def __init__(self, lessons: Sequence[Lesson], tokenizer: Any, reward: RewardConfig, alpha: float) -> None:
        self.speech, self.alpha = speech_of(tokenizer), alpha
        scored = (lesson for lesson in lessons if lesson.meeting.rewarded)
        self.scorers = [Scorer(lesson, reward, self.speech.length) for lesson in scored]

    def __len__(self) -> int:
        return len(self.scorers)

    def episode(self, row: int) -> Episode:
        """Prompts of all roles; returns their replies as text."""
        views = self.scorers[row].lesson.views
        replies = yield [Prompt(one.role, self.speech.prompt(one)) for one in views]
        return [self.speech.reply(one, reply) for one, reply in zip(views, replies, strict=True)]

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """Rewards by role, since each role is a group of its own, and the weights of Eq. 10."""
        results = [self.scorers[row].result(replies) for replies in outcomes]
        weights = [attribution(one.retrieved, self.alpha) for one in results]
        count = len(results)
        return Scores(
            {role: [one.rewards[role] for one in results] for role in ROLES},
            {role: [one[role] for one in weights] for role in ROLES},
            metrics={
                "task": sum(one.task for one in results) / count,
                "held_out": sum(one.held_out for one in results) / count,
                "valid": sum(sum(one.valid.values()) for one in results) / count / len(ROLES),
            },
        )
