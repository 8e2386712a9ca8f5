"""What a trainer trains on: episodes that ask a policy several things, and what groups of them are worth.

A task has a length, its training rows; `episode(row)`, a fresh rollout of one; and `score(row, outcomes)`, the `Scores`
of what the rollouts of a row returned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from remind.memory.operations import State


class Prompt(NamedTuple):
    """What a role is asked: token ids, to be completed by the policy."""

    role: str
    ids: list[int]


#: A rollout: yields prompts that may be answered together, is sent their completions, returns what is to be scored.
Episode = Generator[list[Prompt], list[list[int]], Any]
Made = TypeVar("Made")


def together(
    runs: Sequence[Generator[list[Any], list[Any], Made]], answer: Callable[[list[Any]], Sequence[Any]]
) -> list[tuple[Made, list[Any]]]:
    """What rollouts return, each with its traces, what it asked and was replied; in each round what all that go on ask
    is answered at once."""
    made: dict[int, Made] = {}
    traces: list[list[Any]] = [[] for _ in runs]
    asked = {n: next(run) for n, run in enumerate(runs)}
    while asked:
        replies = iter(answer([one for own in asked.values() for one in own]))
        for n, own in list(asked.items()):
            given = [next(replies) for _ in own]
            traces[n] += zip(own, given, strict=True)
            try:
                asked[n] = runs[n].send(given)
            except StopIteration as end:
                made[n] = end.value
                del asked[n]
    return [(made[n], traces[n]) for n in range(len(runs))]


class Pair(NamedTuple):
    """Two rollouts of a group, the better and the worse of one role, and by how much they differ."""

    role: str
    winner: int
    loser: int
    gap: float


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


@dataclass(frozen=True)
class Lesson:
    """One session of a dialogue with the memory that MemBuilder's expert had before it.

    Attributes:
        dialogue: its id.
        views: what each role is shown, in the order of `ROLES`. replies: of the expert as these roles.
        examples: what is imitated: what a role is shown, and its reply.
        asks: how many questions are rewarded.
        examined: what memories are worth after the session, `Examined` of each.
    """

    dialogue: str
    state: State
    views: Sequence[Any]
    replies: Sequence[str]
    examples: Sequence[tuple[Any, str]]
    asks: int
    examined: Callable[[Sequence[State]], list[Examined]]
