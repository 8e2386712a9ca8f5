"""Tokens of a prompt by turn, turns with gold evidence, and tokens of the answer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remind.grounding.codes import first_character
from remind.models.chat import prompt_tokens, tokenize
from remind.states.pyramid import Rendered
from remind.states.records import StateRecord


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


def evidence_turns(record: StateRecord) -> list[int]:
    """Turns of x0 that hold gold evidence: the turns annotated, for visual questions those with a gold image."""
    if not record.visual:
        return [index for index, turn in enumerate(record.x0.turns) if turn.turn_id in set(record.evidence_found or ())]
    labels = [f"\n[Image #{image} Caption] " for image in record.images_found or ()]
    shown = [record.x0.text[turn.start : turn.end] for turn in record.x0.turns]
    return [index for index, text in enumerate(shown) if any(label in text for label in labels)]


def auc(values: Tensor, gold: Sequence[int]) -> float | None:
    """Probability that a gold turn has a higher value than another, ties half; None without both kinds."""
    is_gold = torch.zeros(len(values), dtype=torch.bool)
    is_gold[list(gold)] = True
    high, low = values[is_gold].double(), values[~is_gold].double()
    if not len(high) or not len(low):
        return None
    above = (high[:, None] > low).double() + 0.5 * (high[:, None] == low).double()
    return float(above.mean())


def answer_tokens(tokenizer: Any, target: str) -> Tensor:
    """Which target tokens share a character with what stands between the answer tags; bool [L], L with end token."""
    start, end = target.find("<answer>") + len("<answer>"), target.find("</answer>")
    inside = [first < end and last > start for first, last in tokenize(tokenizer, target).offsets]
    return torch.tensor([*inside, False])
