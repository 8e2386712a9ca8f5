"""Which turns are taken out of a prompt, and the prompt without them.

A turn goes with its speaker marker, its caption lines and its line ends. Everything else stays as it is, session
headings and gap lines included, even a heading under which no turn is left; no gap line is put where turns were.
So the difference between two prompts is the turns' own tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from remind.core.errors import DataError
from remind.states.parquet import StateRecord
from remind.states.pyramid import Rendered


def x0_of(state: StateRecord | Rendered) -> Rendered:
    return state.x0 if isinstance(state, StateRecord) else state


def without_turns(state: StateRecord | Rendered, turns: Collection[int]) -> str:
    """The x0 prompt with these turns cut out.

    Args:
        state: a record, or its rendered x0.
        turns: indices into `x0.turns`.

    Raises:
        DataError: an index that is no turn.
    """
    rendered = x0_of(state)
    unknown = [turn for turn in turns if not 0 <= turn < len(rendered.turns)]
    if unknown:
        raise DataError(f"there is no turn {unknown[0]}; the prompt has turns 0 to {len(rendered.turns) - 1}")
    parts, cursor = [], 0
    for turn in sorted(set(turns)):
        span = rendered.turns[turn]
        parts.append(rendered.text[cursor : span.start])
        cursor = span.end
    return "".join([*parts, rendered.text[cursor:]])


def only_turns(state: StateRecord | Rendered, turns: Collection[int]) -> str:
    """The x0 prompt with all other turns cut out; see `without_turns`."""
    kept = set(turns)
    unknown = kept - set(range(len(x0_of(state).turns)))
    if unknown:
        raise DataError(f"there is no turn {min(unknown)}; the prompt has turns 0 to {len(x0_of(state).turns) - 1}")
    return without_turns(state, [turn for turn in range(len(x0_of(state).turns)) if turn not in kept])


def marked_turns(record: StateRecord) -> list[int]:
    """Turns inside the blocks of x1, as indices into `x0.turns`."""
    x1 = record.x1
    blocks = list(zip(x1.markers[::2], x1.markers[1::2], strict=True))
    return [
        index
        for index, turn in enumerate(x1.turns)
        if any(first[1] <= turn.start and turn.end <= last[0] for first, last in blocks)
    ]


def evidence_turns(record: StateRecord) -> list[int]:
    """Turns of x0 that hold gold evidence: the turns annotated, for visual questions those with a gold image."""
    if not record.visual:
        return [index for index, turn in enumerate(record.x0.turns) if turn.turn_id in set(record.evidence_found)]
    labels = [f"\n[Image #{image} Caption] " for image in record.images_found]
    shown = [record.x0.text[turn.start : turn.end] for turn in record.x0.turns]
    return [index for index, text in enumerate(shown) if any(label in text for label in labels)]


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
