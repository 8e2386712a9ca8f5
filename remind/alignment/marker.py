"""The marker as a token of its own, where it is not to be plain text (Section 4.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remind.alignment.step import head_weight
from remind.models.backbone import Backbone
from remind.models.chat import tokenize
from remind.states.pyramid import MARKER


def marker_id(tokenizer: Any) -> int | None:
    """The id of the marker's token; None where the marker is plain text."""
    found: int | None = tokenizer.get_added_vocab().get(MARKER)
    return found


def add_marker(backbone: Backbone) -> int:
    """Give the marker a token of its own, unless it has one; its rows are the mean over the tokens it was until then.

    A spare row of the embedding is used where there is one (Qwen's have some hundred); otherwise it grows. The same
    model gives the same rows every time.

    Returns:
        The token's id.
    """
    from tokenizers import AddedToken

    tokenizer, model = backbone.tokenizer, backbone.model
    known = marker_id(tokenizer)
    if known is not None:
        return known
    pieces = tokenize(tokenizer, MARKER).ids
    # not a special token: prompts are tokenised with special tokens written in them as text
    tokenizer.add_tokens([AddedToken(MARKER, special=False, normalized=False)])
    token = marker_id(tokenizer)
    assert token is not None
    if token >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(token + 1, mean_resizing=False)
    rows: list[Tensor] = [model.get_input_embeddings().weight]
    if head_weight(model) is not rows[0]:
        rows.append(head_weight(model))
    with torch.no_grad():
        for weight in rows:
            weight[token] = weight[pieces].double().mean(0).to(weight.dtype)
    return token
