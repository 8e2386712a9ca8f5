"""Tokens of a prompt as the model reads it, chat template included, and the turn each of them belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remind.grounding.places import first_character
from remind.models.chat import prompt_tokens
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

    def per_turn(self, values: Tensor) -> Tensor:
        """Sum of values [T] over the tokens of every turn, [n_turns], on the CPU."""
        values = values.detach().cpu()
        inside = self.turn >= 0
        return torch.zeros(self.n_turns, dtype=values.dtype).index_add_(0, self.turn[inside], values[inside])


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
