"""Log-probability of the target answer after a prompt, token by token; logits at the answer alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remind.core.errors import DataError
from remind.models.chat import end_token_id, tokenize

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def target_ids(tokenizer: Any, target: str) -> list[int]:
    """Tokens of y* with its end token: those that training learns from."""
    return [*tokenize(tokenizer, target).ids, end_token_id(tokenizer)]


def check_length(backbone: Backbone, prompt: int, answer: int, record: str | None = None) -> None:
    """Raise DataError where prompt and answer are longer than the model takes."""
    if prompt + answer > backbone.max_length:
        raise DataError(
            f"prompt and answer of {prompt} + {answer} tokens, but {backbone.name} takes {backbone.max_length}; "
            "build shorter states, or set on_long skip",
            record=record,
        )


@torch.no_grad()
def answer_logprobs(
    backbone: Backbone, prompts: Sequence[Sequence[int]], target_ids: Sequence[int], batch_size: int = 4
) -> list[Tensor]:
    """Log-probability of each target token after each of several prompts, in nats; sum it for that of the answer.

    Args:
        prompts: token ids, chat template included.
        target_ids: [L], e.g. from `target_ids`.
        batch_size: prompts in one forward.

    Returns:
        For each prompt [L] on the CPU, float32 or the model's dtype where that is wider.

    Raises:
        DataError: prompt and answer are longer than the model takes.
    """
    for prompt in prompts:
        check_length(backbone, len(prompt), len(target_ids))
    results: dict[int, Tensor] = {}
    # neighbours of like length waste little on padding
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = _left_padded(backbone, [[*prompts[number], *target_ids[:-1]] for number in chosen])
        results.update(zip(chosen, logprobs(backbone, batch, target_ids).cpu(), strict=True))
    return [results[number] for number in range(len(prompts))]


def _left_padded(backbone: Backbone, rows: list[list[int]]) -> dict[str, Tensor]:
    """Model inputs; the answer then ends in the same column in every row."""
    width = max(map(len, rows))
    padding = backbone.tokenizer.pad_token_id or 0
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids} if bool(mask.all()) else {"input_ids": ids, "attention_mask": mask}


def logprobs(backbone: Backbone, inputs: dict[str, Tensor], target_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [B, L] of the target at the last L positions; gradients follow the caller's mode.

    Args:
        inputs: input_ids [B, T] that end in target_ids[:-1], attention_mask if there is padding.
    """
    model, length = backbone.model, len(target_ids)
    moved = {name: value.to(backbone.device) for name, value in inputs.items()}
    positions = backbone.position_ids(moved)
    placed = moved if positions is None else {**moved, "position_ids": positions}
    # have the head run at the answer alone, where the model can
    last = {"logits_to_keep": length} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(**placed, **last, use_cache=False).logits[:, -length:]
    targets = torch.tensor(target_ids, device=logits.device)
    rows = [
        F.log_softmax(row.to(torch.promote_types(row.dtype, torch.float32)), -1).gather(1, targets[:, None])[:, 0]
        for row in logits
    ]
    return torch.stack(rows)
