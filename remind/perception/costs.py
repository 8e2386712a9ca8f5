"""What turns, headings and gaps of a dialogue cost in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remind.data.dialogue import Dialogue, Question
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import FactualState, Segment, Strategy, render

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
    state = FactualState(dialogue, Question("", dialogue.id, ""), tuple(whole), Strategy(()))
    rendered = render(state)
    turns = encoder.count_many([rendered.text[span.start : span.end] for span in rendered.turns])
    headings, before = [], rendered.dialogue[0]
    firsts = {part.start for part in whole}
    for position, span in enumerate(rendered.turns):
        if position in firsts:
            headings.append(rendered.text[before : span.start])
        before = span.end
    counted = iter(encoder.count_many(headings))
    per_session = tuple(next(counted) if session.turns else 0 for session in dialogue.sessions)
    return Costs(tuple(turns), per_session, encoder.count_tokens(GAP))
