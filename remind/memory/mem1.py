"""MEM1 (Zhou et al., 2025): a question is answered in rounds of search, and from round to round only an
internal state goes on, which the model writes anew each time.

The authors train the model for this by reinforcement learning; any chat model can be put in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from remind.data.dialogue import Session
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query, System
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt


@dataclass(frozen=True)
class Mem1System(System):
    """The last internal state with the model's own answer; its sources are the turns that were found on the way."""

    templates = ("mem1_step",)
    rules = "MIT-MI/MEM1, prompts"
    not_as_published = ("the model is the run's, not one trained for this",)
    name: str = "mem1"
    rounds: PositiveInt = 6
    """Calls for a question, at most."""
    top: PositiveInt = 3
    """Turns that a search brings, by cosine."""
    room: PositiveInt = 1024
    """Tokens of a reply."""


class Mem1Bank(Bank, of=Mem1System):
    system: Mem1System

    def remember(self, session: Session) -> None:
        self.put_turns(session.turns)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        state = found = answer = ""
        seen = set[int]()
        trace["searches"] = []
        for left in reversed(range(self.system.rounds)):
            data = {"question": query.asked, "state": state, "found": found}
            reply = self.ask("read", "mem1_step", data, self.system.room, left=left)
            if reply.failure is not None:
                break
            state = _part("think", reply.text) or state
            said = without_thoughts(reply.text)
            search = _part("search", said)
            # a reply with both is taken for a search, as by the authors
            if not search:
                answer = _part("answer", said)
                break
            trace["searches"].append(search)
            if left:
                # shown in the order of the dialogue
                numbers = sorted(number for number, _ in islice(self.store.rank(search, "dense"), self.system.top))
                seen.update(numbers)
                found = "\n".join(self.store.memory(number).dated for number in numbers)
        trace["answer"] = answer
        text = "\n".join(part for part in (state, answer and f"Answer: {answer}") if part)
        if text:
            turns = (turn for number in sorted(seen) for turn in self.store.memory(number).sources or ())
            yield self.written("state", text, turns)


def _part(tag: str, text: str) -> str:
    """What stands between the tags; "": there are none."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return match[1].strip() if match else ""
