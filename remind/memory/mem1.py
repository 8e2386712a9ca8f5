"""MEM1 (Zhou et al., 2025): a question is answered in rounds of search, and from round to round only an
internal state goes on, which the model writes anew each time.

The authors train the model for this by reinforcement learning; any chat model can be put in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from remind.data.dialogue import Session
from remind.memory.asking import Written, ask, asked, dated, failed
from remind.memory.base import Bank, Memory, Query
from remind.memory.store import Draft
from remind.states.pyramid import turn_text
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt

_PARTS = {tag: re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) for tag in ("search", "answer")}
#: The model's next state.
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Mem1System(Written):
    """The last internal state with the model's own answer; its sources are the turns that were found on the way."""

    templates = ("mem1_step",)
    not_as_published = ("the prompts are in our own words", "the model is the run's, not one trained for this")
    name: str = "mem1"
    rounds: PositiveInt = 6
    """Calls for a question, at most."""
    top: PositiveInt = 3
    """Turns that a search brings, by cosine."""
    room: PositiveInt = 1024
    """Tokens of a reply."""


class Mem1Bank(Bank, of=Mem1System):
    system: Mem1System

    def remember(self, session: Session) -> Iterable[str]:
        texts = list(map(turn_text, session.turns))
        vectors, tokens = self.encoder.encode_apart(texts), self.encoder.count_many(texts)
        for turn, vector, count in zip(session.turns, vectors, tokens, strict=True):
            self.store.add(Draft("turn", (turn.id,)), count, vector[None])
        return ()

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        state = found = answer = ""
        seen: set[int] = set()
        trace["searches"] = []
        for left in reversed(range(self.system.rounds)):
            data = {"question": asked(query), "state": state, "found": found}
            reply = ask(self, "read", "mem1_step", data, self.system.room, left=left)
            if reply.failure is not None:
                trace["failed"] = [failed("read", reply)]
                break
            thought, rest = _THOUGHT.search(reply.text), without_thoughts(reply.text)
            said = {tag: match[1].strip() if (match := part.search(rest)) else "" for tag, part in _PARTS.items()}
            state = (thought and thought[1].strip()) or state
            # a reply with both is taken for a search, as by the authors
            if not said["search"]:
                answer = said["answer"]
                break
            trace["searches"].append(said["search"])
            if left:
                ranked = self.ranker.rank(said["search"], "dense")
                numbers = [number for number, _ in islice(ranked, self.system.top)]
                seen.update(numbers)
                found = "\n".join(dated(self.store.memory(number)) for number in numbers)
        trace["answer"] = answer
        text = "\n".join(part for part in (state, answer and f"Answer: {answer}") if part)
        if text:
            turns = dict.fromkeys(turn for number in sorted(seen) for turn in self.store.memory(number).sources or ())
            yield Memory("state", text, "state", tuple(turns) or None, None, 1.0, self.encoder.count_tokens(text))
