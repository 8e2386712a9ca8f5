"""A task of two roles whose episodes differ in length, in eight words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remind.memory_training.episodes import Prompt, Scores

WORDS = ("<pad>", "<end>", "a", "b", "c", "d", "e", "f")
END = 1


class TwoRoles:
    """`first` completes one prompt; `second` then one prompt for each `a` (id 2) of it, two at most."""

    def __len__(self) -> int:
        return 40

    def episode(self, row: int) -> Any:
        (reply,) = yield [Prompt("first", [3 + row % 4, 4])]
        count = min(reply.count(2), 2)
        replies = (yield [Prompt("second", [5, 6, *reply[:1]])] * count) if count else []
        return [reply, *replies]

    def score(self, row: int, outcomes: Sequence[list[list[int]]]) -> Any:
        worth = [float(sum(text.count(2) for text in outcome)) for outcome in outcomes]
        return Scores({"first": worth, "second": worth}, {"first": [4.0] * len(worth)}, metrics={"a": sum(worth)})
