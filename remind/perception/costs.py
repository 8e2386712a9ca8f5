"""What turns, headings and gaps of a dialogue cost in a prompt, and a dialogue section that turns are added to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from remind.data.dialogue import Dialogue, Question
from remind.states.pyramid import FactualState, Segment, Strategy, render

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder
    from remind.perception.index import DialogueIndex

#: How the prompt shows a gap inside a session.
GAP = "[…]"


@dataclass(frozen=True)
class Costs:
    """Tokens the dialogue section of a prompt takes: each turn with its captions, each session heading, a gap line."""

    turns: tuple[int, ...]
    headings: tuple[int, ...]
    gap: int

    def of(self, positions: Sequence[int], session_of: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions.

        Args:
            session_of: number of the session of every turn.
        """
        total, previous, session = 0, None, None
        for position in positions:
            here = session_of[position]
            if here != session:
                total += self.headings[here]
            elif position - 1 != previous:
                total += self.gap
            total += self.turns[position]
            previous, session = position, here
        return total


def prompt_costs(dialogue: Dialogue, encoder: SentenceEncoder) -> Costs:
    """Tokens of every turn and session heading as the prompt renders them, in the encoder's vocabulary."""
    whole, start = [], 0
    for session in dialogue.sessions:
        if session.turns:
            whole.append(Segment(start, start + len(session.turns) - 1))
        start += len(session.turns)
    rendered = render(FactualState(dialogue, Question("", dialogue.id, ""), tuple(whole), Strategy(())))
    turns = encoder.count_many([rendered.text[span.start : span.end] for span in rendered.turns])
    headings, before = [], rendered.dialogue[0]
    firsts = {segment.start for segment in whole}
    for position, span in enumerate(rendered.turns):
        if position in firsts:
            headings.append(rendered.text[before : span.start])
        before = span.end
    counts = iter(encoder.count_many(headings))
    per_session = tuple(next(counts) if session.turns else 0 for session in dialogue.sessions)
    return Costs(tuple(turns), per_session, encoder.count_tokens(GAP))


class Section:
    """Turns chosen so far, and the tokens their dialogue section takes.

    What a stretch of turns costs depends on its neighbours: the first of a session brings the heading, one away from
    the others a gap line, one between two of them removes one.

    Attributes:
        spent: tokens, as `DialogueIndex.cost` counts them.
    """

    def __init__(self, index: DialogueIndex) -> None:
        self._index, self._gap = index, index.costs.gap
        # with a place before the first turn and one after the last; bytes, which are read one by one faster than arrays
        self._chosen = bytearray(len(index.prices) + 2)
        self._opened = bytearray(len(index.costs.headings))
        self.spent = 0

    def room(self, budget: int) -> float:
        """Tokens left; without end as long as nothing is spent."""
        return budget - self.spent if self.spent else math.inf

    def price(self, start: int, end: int) -> int:
        """Tokens that turns start to end (inclusive) of one session would add; none of them is chosen yet."""
        tokens, sessions = sum(self._index.costs.turns[start : end + 1]), self._index.session_of
        session = sessions[start]
        if not self._opened[session]:
            return tokens + self._index.costs.headings[session]
        touching = int(self._chosen[start] and sessions[start - 1] == session)
        touching += int(self._chosen[end + 2] and sessions[end + 1] == session)
        return tokens + (1 - touching) * self._gap

    def prices(self, positions: np.ndarray) -> np.ndarray:
        """`price` of single turns [m]; for chosen ones more than there can be room for."""
        index = self._index
        chosen, opened = np.frombuffer(self._chosen, dtype=bool), np.frombuffer(self._opened, dtype=bool)
        sessions = index.sessions[positions]
        touching = (chosen[positions] & index.follows[positions]).astype(np.int64)
        touching += chosen[positions + 2] & index.follows[positions + 1]
        added = np.where(opened[sessions], (1 - touching) * self._gap, index.headings[sessions])
        return np.where(chosen[positions + 1], np.iinfo(np.int64).max, index.prices[positions] + added)

    def add(self, start: int, end: int) -> None:
        """Choose turns start to end (inclusive) of one session; none of them is chosen yet."""
        self.spent += self.price(start, end)
        self._opened[self._index.session_of[start]] = 1
        self._chosen[start + 1 : end + 2] = b"\1" * (end + 1 - start)

    def positions(self) -> list[int]:
        """The chosen turns, ascending."""
        positions: list[int] = np.flatnonzero(np.frombuffer(self._chosen, dtype=bool)[1:-1]).tolist()
        return positions
