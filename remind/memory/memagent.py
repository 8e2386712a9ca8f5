"""MemAgent (Yu et al., 2025, Section 3): nothing is prepared; for each question the whole dialogue is read in chunks,
and a memory of bounded length is written over after each.

The authors train the model for this by reinforcement learning; any chat model can be put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remind.data.dialogue import Session
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query, System, words
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt


@dataclass(frozen=True)
class MemAgentSystem(System):
    """A memory that is written while the dialogue is read for one question. It tells no sources: after each chunk it is
    written anew as a whole. The trace has it after each chunk."""

    templates = ("memagent_read",)
    rules = "the paper, Table 1"
    provenance = None
    not_as_published = ("the model is the run's, not one trained for this",)
    name: str = "memagent"
    chunk: PositiveInt = 5000
    """Tokens that are read at a time, in the run's encoder; a turn is not cut."""
    room: PositiveInt = 1024
    """Tokens of the memory."""


class MemAgentBank(Bank, of=MemAgentSystem):
    system: MemAgentSystem

    def remember(self, session: Session) -> None:
        """Nothing but the session."""

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        memory = ""
        trace["memories"] = []
        for section in self._sections():
            data = {"problem": query.asked, "memory": memory, "section": section}
            reply = self.ask("read", "memagent_read", data, self.system.room)
            # without a reply the memory stays as it was
            told = "" if reply.failure is not None else words(reply)
            memory = told or memory
            trace["memories"].append(memory)
        if memory:
            yield self.written("notes", memory, ())

    def _sections(self) -> Iterator[str]:
        """The dialogue in chunks."""
        lines, spent = list[str](), 0
        for session in self.store.sessions():
            texts = list(map(turn_text, session.turns))
            if session.time:
                texts[0] = f"[{one_line(session.time)}]\n{texts[0]}"
            for text, count in zip(texts, self.encoder.count_many(texts), strict=True):
                if lines and spent + count > self.system.chunk:
                    yield "\n".join(lines)
                    lines, spent = [], 0
                lines.append(text)
                spent += count
        if lines:
            yield "\n".join(lines)
