"""What a trainer trains on: episodes that ask a policy several things, and what groups of them are worth."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from remind.memory_training.rewards import Pair


@dataclass(frozen=True)
class Prompt:
    """What a role is asked: token ids, to be completed by the policy."""

    role: str
    ids: list[int]


@dataclass(frozen=True)
class Trace:
    """One completed prompt."""

    role: str
    prompt: list[int]
    completion: list[int]


#: A rollout: yields prompts that may be answered together, is sent their completions, returns what is to be scored.
Episode = Generator[list[Prompt], list[list[int]], Any]


@dataclass(frozen=True)
class Scores:
    """What the rollouts of one group are worth.

    Attributes:
        rewards: by role, one per rollout; NaN: it could not be had. Roles that share a reward repeat it.
        weights: by role, the w of Eq. 12, one per rollout; roles that are left out have 1.
        pairs: comparisons of SaliMory's contrastive terms, at most one a role.
        metrics: by name, averaged over the groups of a generation.
    """

    rewards: Mapping[str, Sequence[float]]
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Examined:
    """What a memory is worth for the questions on a session.

    Attributes:
        task: share of the rewarded questions that were answered right (MemBuilder, Eq. 5); NaN: it could not be had.
        held_out: the same of the questions that are never rewarded; None: there are none.
        retrieved: the role of every entry that was retrieved for a rewarded question.
    """

    task: float
    held_out: float | None
    retrieved: tuple[str, ...]


class Task(Protocol):
    """What a policy is trained on."""

    def __len__(self) -> int:
        """Training rows."""

    def episode(self, row: int) -> Episode:
        """A fresh rollout of a training row."""

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """The worth of the rollouts of one row, from what they returned."""
