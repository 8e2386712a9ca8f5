"""Which turns of a prompt are marked, and the prompt with turns taken out.

A turn goes with its speaker marker, its caption lines and its line ends. Everything else stays as it is, session
headings and gap lines included, even a heading under which no turn is left; no gap line is put where turns were.
So the difference between two prompts is the turns' own tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from remind.states.pyramid import Rendered
from remind.states.records import StateRecord, blocks_of


def without_turns(rendered: Rendered, turns: Collection[int]) -> str:
    """The prompt with the turns of these indices cut out."""
    parts, cursor = [], 0
    for turn in sorted(set(turns)):
        span = rendered.turns[turn]
        parts.append(rendered.text[cursor : span.start])
        cursor = span.end
    return "".join([*parts, rendered.text[cursor:]])


def only_turns(rendered: Rendered, turns: Collection[int]) -> str:
    """The prompt with all other turns cut out."""
    return without_turns(rendered, set(range(len(rendered.turns))) - set(turns))


def marked_turns(record: StateRecord) -> list[int]:
    """Turns inside the blocks of x1, as indices into `x0.turns`."""
    return [turn for first, last in blocks_of(record.x1) for turn in range(first, last + 1)]


def fill(order: Iterable[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Turns in `order` that make up `budget` tokens as nearly as that order allows, ascending.

    Each turn that still fits is taken. Then the smallest turn left joins them if that brings the total nearer to the
    budget, so that the total misses it by at most half the size of that turn.

    Args:
        order: indices, most wanted first.
        sizes: tokens of every turn.
        budget: tokens wanted.
    """
    chosen, left, total = [], [], 0
    for turn in order:
        if total + sizes[turn] <= budget:
            chosen.append(turn)
            total += sizes[turn]
        else:
            left.append(turn)
    last = min(left, key=lambda turn: sizes[turn], default=None)
    if last is not None and total + sizes[last] - budget < budget - total:
        chosen.append(last)
    return sorted(chosen)
