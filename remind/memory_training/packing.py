"""Completions of the same prompt in one row, so that a forward pass reads the prompt once and not once a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

#: Models of plain causal attention, which a mask and positions say all about.
KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Packed:
    """N distinct prompts, each in a row with all its completions, of B in all.

    A completion stands there as the last token of its prompt and all of its own but the last: what predicts it.

    Attributes:
        ids, positions: [N, L].
        labels: [N, L], the token that follows; -100 where that is none of a completion.
        visible: [N, 1, L, L], whether a token (third axis) attends to another: of its own completion or of the prompt.
        places: [B, T], where in the flattened rows each token of a completion is predicted; 0 behind its end.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    visible: Tensor
    places: Tensor

    def to(self, device: torch.device) -> Packed:
        """On a device."""
        return Packed(**{one.name: getattr(self, one.name).to(device) for one in fields(self)})


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int) -> Packed | None:
    """Pack B prompts and their completions; None where attention would be no less work than row by row."""
    if not all(prompts):
        return None
    found: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        found.setdefault(tuple(prompt), []).append(row)
    longest = max(map(len, completions))
    width = max(len(prompt) - 1 + sum(len(completions[row]) for row in rows) for prompt, rows in found.items())
    if len(found) * width**2 >= len(prompts) * (max(map(len, prompts)) + longest) ** 2:
        return None
    shape = (len(found), width)
    ids, positions = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    labels, owners = torch.full(shape, -100), torch.full(shape, -1)
    places = torch.zeros(len(prompts), longest, dtype=torch.long)
    for n, (prompt, rows) in enumerate(found.items()):
        end = len(prompt) - 1
        ids[n, :end], positions[n, :end], owners[n, :end] = torch.tensor(prompt[:-1]), torch.arange(end), 0
        for number, row in enumerate(rows, 1):
            own = completions[row]
            here = slice(end, end + len(own))
            ids[n, here] = torch.tensor([prompt[-1], *own][: len(own)])
            positions[n, here] = len(prompt) - 1 + torch.arange(len(own))
            labels[n, here], owners[n, here] = torch.tensor(own), number
            places[row, : len(own)] = n * width + end + torch.arange(len(own))
            end = here.stop
    before = torch.ones(width, width, dtype=torch.bool).tril()
    same = owners[:, :, None] == owners[:, None, :]
    return Packed(ids, positions, labels, ((same | (owners[:, None, :] == 0)) & before)[:, None], places)


def can_pack(config: Any) -> bool:
    """Whether a model with this configuration takes `Packed.visible` as its mask."""
    plain = getattr(config, "sliding_window", None) is None and getattr(config, "_attn_implementation", "") == "sdpa"
    return plain and config.model_type in KINDS


def packed_logp(model: Any, packed: Packed) -> Tensor:
    """Log-probabilities of the completions [B, T] by a model with TRL's fused head; behind their ends anything."""
    made = model(
        input_ids=packed.ids,
        attention_mask=packed.visible,
        position_ids=packed.positions,
        shift_labels=packed.labels,
        fused_lm_head=True,
    )
    logp: Tensor = made.log_probs.flatten()[packed.places]
    return logp
