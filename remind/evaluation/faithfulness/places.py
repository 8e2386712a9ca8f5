"""Tokens of a prompt as the model reads it, chat template included, and the turn each of them belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remind.chat import Tokens, prompt_ids, tokenize
from remind.errors import ModelError
from remind.grounding.places import first_character
from remind.pyramid import Rendered


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
    ids, offsets = _located(tokenizer, rendered.text)
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


def _located(tokenizer: Any, text: str) -> Tokens:
    """The ids of `prompt_ids` with offsets in `text`; those of the template lie outside of it."""
    ids = prompt_ids(tokenizer, text)
    head, body, tail = _shell(tokenizer, text)
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not any(special in text for special in specials):
        whole = tokenizer(head + body + tail, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found, offsets = list(whole["input_ids"]), whole["offset_mapping"]
    else:
        # a special token written in the dialogue is text; only the template's own cut the prompt into pieces
        pattern = "|".join(map(re.escape, specials))
        head, tail = re.split(pattern, head)[-1], re.split(pattern, tail)[0]
        found, offsets = tokenize(tokenizer, head + body + tail)
    first = next((n for n in range(len(ids) - len(found) + 1) if ids[n : n + len(found)] == found), None)
    if first is None:
        raise ModelError("the characters of this prompt's tokens cannot be found; its tokenizer cuts it otherwise")
    shift = text.index(body) - len(head)
    placed = [(start + shift, end + shift) if end > start else (-1, -1) for start, end in offsets]
    before, after = [(-1, -1)] * first, [(-1, -1)] * (len(ids) - first - len(found))
    return Tokens(ids, [*before, *placed, *after])


def _shell(tokenizer: Any, text: str) -> tuple[str, str, str]:
    """What the chat template puts before the text, the text as it shows it, and what it puts after."""
    if not tokenizer.chat_template:
        return "", text, "\n"

    def filled(content: str) -> str:
        message = [{"role": "user", "content": content}]
        return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    # plain letters, so that no template trims or escapes them
    slot = "slot"
    while slot in text or slot in str(tokenizer.chat_template):
        slot += "x"
    parts, whole = filled(slot).split(slot), filled(text)
    for body in (text, text.strip()):
        if len(parts) == 2 and whole == parts[0] + body + parts[1]:
            return parts[0], body, parts[1]
    raise ModelError("the chat template does not show the message once and unchanged")
