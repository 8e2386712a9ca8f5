"""Completions of the same prompt in one row, so that a forward pass reads the prompt once and not once a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from remind.alignment.objective import accumulation_dtype
from remind.alignment.step import body_of, head_of

#: Models of plain causal attention, which a mask and positions say all about.
KINDS = ("llama", "qwen2", "qwen3")
#: Logits that exist at once.
LOGITS = 2**26


class Packed(NamedTuple):
    """N distinct prompts, each in a row with all its completions, of B in all; or B prompts with one completion each.

    A completion stands there as the last token of its prompt and all of its own but the last: what predicts it.

    Attributes:
        ids: [N, L], padded on the right.
        positions: [N, L]; None: as they stand.
        visible: [N, 1, L, L], whether a token (third axis) attends to another: of its own completion or of the prompt.
            None: to all before it.
        targets: [B, T], the completions.
        mask: [B, T], 1 at their tokens.
        places: [B, T], where in the flattened rows each of them is predicted; 0 behind the end.
    """

    ids: Tensor
    positions: Tensor | None
    visible: Tensor | None
    targets: Tensor
    mask: Tensor
    places: Tensor


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, share: bool) -> Packed:
    """Pack B prompts and their completions.

    Args:
        share: put completions of the same prompt in a row, unless attention would then be no less work.
    """
    groups: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else row, []).append(row)
    longest = max(map(len, completions))
    width = max(len(prompts[rows[0]]) - 1 + sum(len(completions[row]) for row in rows) for rows in groups.values())
    if share and len(groups) * width**2 >= len(prompts) * (max(map(len, prompts)) + longest) ** 2:
        return pack(prompts, completions, pad, share=False)
    shape = (len(groups), width)
    ids, positions, owners = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    targets, places = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(len(prompts), longest)
    for n, rows in enumerate(groups.values()):
        *before, last = prompts[rows[0]]
        end = len(before)
        ids[n, :end], positions[n, :end], owners[n, :end] = torch.tensor(before), torch.arange(end), 0
        for number, row in enumerate(rows, 1):
            own = completions[row]
            here, count = slice(end, end + len(own)), len(own)
            ids[n, here] = torch.tensor([last, *own][:count])
            positions[n, here], owners[n, here] = len(before) + torch.arange(count), number
            targets[row, :count], mask[row, :count] = torch.tensor(own), 1
            places[row, :count] = n * width + end + torch.arange(count)
            end = here.stop
    if not share:
        return Packed(ids, None, None, targets, mask, places)
    same = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    visible = same & torch.ones(width, width, dtype=torch.bool).tril()
    return Packed(ids, positions, visible[:, None], targets, mask, places)


def can_share(config: Any) -> bool:
    """Whether a model with this configuration takes `Packed.visible` as its mask."""
    plain = getattr(config, "sliding_window", None) is None and getattr(config, "_attn_implementation", "") == "sdpa"
    return plain and config.model_type in KINDS


class PolicyModel(nn.Module):
    """A language model whose forward gives log-probabilities of completions [B, T], 0 behind their ends.

    The head is read inside the forward, so that the hooks of DDP see its weight in use, and some positions at a time.

    Args:
        temperature: of sampling.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, packed: Packed) -> Tensor:
        body, head, counted = body_of(self.model), head_of(self.model), packed.mask > 0
        hidden = body(
            input_ids=packed.ids, attention_mask=packed.visible, position_ids=packed.positions, use_cache=False
        ).last_hidden_state
        states = hidden.flatten(0, 1)[packed.places[counted]]
        with torch.autocast(states.device.type, enabled=False):
            wide = head.wide(accumulation_dtype(states.dtype))
            size = max(LOGITS // len(head.weight), 1)
            parts = zip(states.split(size), packed.targets[counted].split(size), strict=True)
            found = [checkpoint(self._log_p, wide, *part, use_reentrant=False) for part in parts]
        return torch.zeros_like(packed.mask, dtype=wide.weight.dtype).masked_scatter(counted, torch.cat(found))

    def _log_p(self, head: Any, states: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy(head.logits(states) / self.temperature, targets, reduction="none")
