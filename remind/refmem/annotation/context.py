"""Which turns stand around an item's proposed evidence: what annotators see first of a long dialogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import yaml

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue
from remind.refmem.items import Item

#: Segments of a dialogue as (first, last) positions in `Dialogue.turns`, both included.
Segments = Sequence[tuple[int, int]]


def candidate_turns(dialogue: Dialogue, item: Item) -> list[int]:
    """Positions of the proposed evidence: its turns, and those that share its images.

    Raises:
        DataError: evidence that is not in the dialogue.
    """
    shared = {image.index: n for n, turn in enumerate(dialogue.turns) for image in turn.images}
    lost = [image for image in item.images if image not in shared]
    lost_turns = [turn_id for turn_id in item.evidence if turn_id not in dialogue.positions]
    if lost or lost_turns:
        what = f"turn {lost_turns[0]!r}" if lost_turns else f"image {lost[0]}"
        raise DataError(f"its evidence {what} is not in dialogue {dialogue.id!r}", record=item.id)
    return sorted({*(dialogue.positions[turn_id] for turn_id in item.evidence), *(shared[n] for n in item.images)})


def windows(dialogue: Dialogue, item: Item, around: int, segments: Segments | None = None) -> list[tuple[int, int]]:
    """Ranges of turns (first, last) around the proposed evidence, in order, apart from each other by a turn or more.

    Args:
        around: turns before and after each, inside its session. Without any evidence the range is the first session.
        segments: of the dialogue; each segment that holds evidence is shown whole too.
    """
    bounds, start = [], 0
    for session in dialogue.sessions:
        bounds.append((start, start + len(session.turns) - 1))
        start += len(session.turns)
    positions = candidate_turns(dialogue, item)
    wanted: set[int] = set()
    for n in positions:
        first, last = next(bound for bound in bounds if bound[0] <= n <= bound[1])
        wanted.update(range(max(first, n - around), min(last, n + around) + 1))
        for low, high in segments or ():
            if low <= n <= high:
                wanted.update(range(low, high + 1))
    if not positions:
        first, last = next(bound for bound in bounds if bound[0] <= bound[1])
        wanted.update(range(first, last + 1))
    found: list[tuple[int, int]] = []
    for n in sorted(wanted):
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


@cache
def demands() -> Mapping[str, str]:
    """What each dimension asks of a reader, in a clause."""
    guides = yaml.safe_load((files("remind") / "text" / "guides.yaml").read_text(encoding="utf-8"))
    return {name: guide["demand"] for name, guide in guides["dimensions"].items()}
