"""MemAgent (Yu et al., 2025): nothing is prepared; for each question the whole dialogue is read in chunks,
and a memory of bounded length is written over after each.

The authors train the model for this by reinforcement learning; any chat model can be put in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from remind.data.dialogue import Session
from remind.memory.asking import Fault, Written, ask, asked, failed, words
from remind.memory.base import Bank, Memory, Query
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt


@dataclass(frozen=True)
class MemAgentSystem(Written):
    """A memory that is written while the dialogue is read for one question. It tells no sources: after each chunk it is
    written anew as a whole. The trace names the turns of each chunk."""

    templates = ("memagent_read",)
    provenance = None
    not_as_published = ("the prompts are in our own words", "the model is the run's, not one trained for this")
    name: str = "memagent"
    chunk: PositiveInt = 5000
    """Tokens that are read at a time, in the run's encoder; a turn is not cut."""
    room: PositiveInt = 1024
    """Tokens of the memory."""
    replies: Fault = "fixed"
    """What happens to the memory if a reply fails or is empty. upstream: it is lost, and after a failure nothing
    more is read. fixed: it stays as it was."""


class MemAgentBank(Bank, of=MemAgentSystem):
    system: MemAgentSystem
    _chunks: tuple[int, list[tuple[str, list[str]]]] = (-1, [])

    def remember(self, session: Session) -> Iterable[str]:
        return ()

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        upstream = self.system.replies == "upstream"
        memory = ""
        trace["chunks"] = []
        for part, turns in self._parts():
            data = {"question": asked(query), "notes": memory, "part": part}
            reply = ask(self, "read", "memagent_read", data, self.system.room)
            if reply.failure is not None:
                trace.setdefault("failed", []).append(failed("read", reply))
            if reply.failure is not None and upstream:
                memory = ""
                break
            told = "" if reply.failure is not None else words(reply)
            trace["chunks"].append({"turns": turns, "changed": told not in ("", memory)})
            memory = told if told or upstream else memory
        if memory:
            yield Memory("memory", memory, "notes", None, None, 1.0, self.encoder.count_tokens(memory))

    def _parts(self) -> list[tuple[str, list[str]]]:
        """Text and turn ids of each chunk; cut once for each state of the bank."""
        if self._chunks[0] != self.store.version:
            self._chunks = (self.store.version, list(self._cut()))
        return self._chunks[1]

    def _cut(self) -> Iterator[tuple[str, list[str]]]:
        lines: list[str] = []
        turns: list[str] = []
        spent = 0
        for session in self.store.sessions():
            texts = list(map(turn_text, session.turns))
            if session.time and texts:
                texts[0] = f"[{one_line(session.time)}]\n{texts[0]}"
            for turn, text, count in zip(session.turns, texts, self.encoder.count_many(texts), strict=True):
                if turns and spent + count > self.system.chunk:
                    yield "\n".join(lines), turns
                    lines, turns, spent = [], [], 0
                lines.append(text)
                turns.append(turn.id)
                spent += count
        if turns:
            yield "\n".join(lines), turns
