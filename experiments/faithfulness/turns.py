"""The turns of a prompt: which tokens are whose, which turns are marked, and the prompt with turns taken out.

A turn goes with its speaker marker, its caption lines and its line ends. Everything else stays as it is, session
headings and gap lines included, even a heading under which no turn is left; no gap line is put where turns were.
So the difference between two prompts is the turns' own tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remind.evaluation.rebuild import blocks_of
from remind.grounding.places import first_character
from remind.models.chat import prompt_tokens
from remind.states.parquet import StateRecord
from remind.states.pyramid import Rendered


@dataclass(frozen=True)
class Prompt:
    """A prompt of T tokens.

    Attributes:
        ids: what `prompt_ids` gives.
        turn: int64 [T], index into the turns, -1 outside of them.
        n_turns: turns there are.
    """

    ids: list[int]
    turn: Tensor
    n_turns: int

    @property
    def sizes(self) -> list[int]:
        """Tokens of every turn."""
        inside = self.turn[self.turn >= 0]
        return [int(n) for n in torch.bincount(inside, minlength=self.n_turns)]


def prompt_of(tokenizer: Any, rendered: Rendered) -> Prompt:
    """Tokens of a rendered state. A token stands where its first character that is not white space does.

    Raises:
        ModelError: a chat template that changes the text, so that its characters cannot be found again.
    """
    ids, offsets = prompt_tokens(tokenizer, rendered.text)
    turn_at = np.full(len(rendered.text) + 1, -1, dtype=np.int64)
    for index, span in enumerate(rendered.turns):
        turn_at[span.start : span.end] = index
    size = len(rendered.text)
    inside = [start < size and end > 0 and end > start for start, end in offsets]
    places = [
        turn_at[first_character(rendered.text, (max(start, 0), min(end, size)))] if within else -1
        for (start, end), within in zip(offsets, inside, strict=True)
    ]
    return Prompt(ids, torch.tensor(places, dtype=torch.int64), len(rendered.turns))


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
