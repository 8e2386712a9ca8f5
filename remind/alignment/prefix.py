"""Prefix sharing: what the prompts under x1 and x2 have in common goes through the model once, as part of x1.

x2 is x1 with a summary between its dialogue and its question, and a causal model computes the tokens before the summary
alike in both. While x1 goes forward (with its graph, checkpointed or not), each attention layer's keys and values of
those tokens are cached, detached; then only the rest of x2 goes forward, without gradient, and attends to them. That is
x2's own forward to the last bit but for the order of sums, so it is exact wherever x2 only teaches and teachers are
detached. Keys and values are freed layer by layer, before the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from remind.core.errors import ModelError
from remind.models.attention import Attention, exchanged_attention

#: Kinds of layers whose tokens know of earlier ones by attention alone; windows are refused where they attend.
_ALIKE = frozenset({"full_attention", "sliding_attention", "moe", "mlp"})


@dataclass
class SharedPrefix:
    """Keys and values of the common tokens, by attention layer.

    Attributes:
        lengths: [B], common tokens of each sample.
        cached: [B, heads, longest, head_dim] keys and values; those past a sample's length are never read.
        mask: [B, 1, S, longest + S], which of the cached and of its own tokens each of the S tokens may attend to; None
            while keys and values are still being cached.
    """

    lengths: Tensor
    cached: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        self.longest = int(self.lengths.max())

    def attend(
        self,
        inner: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of one layer, in place of its own."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.mask is None:
            self.cached[module] = (key[:, :, : self.longest].detach(), value[:, :, : self.longest].detach())
            return inner(module, query, key, value, mask, **kwargs)
        before = self.cached.pop(module)
        key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        # flash kernels take no mask, and this one is small
        result: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, self.mask, **kwargs
        )
        return result

    def expect(self, tokens: int) -> None:
        """From here on attention is that of `tokens` tokens that follow each sample's prefix.

        Raises:
            ModelError: no attention layer has passed by here, so that there is nothing to attend to.
        """
        if not self.cached:
            raise ModelError("the attention of this model cannot be shared: set prefix_sharing false")
        device = self.lengths.device
        before = torch.arange(self.longest, device=device) < self.lengths[:, None]
        own = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        n = len(self.lengths)
        self.mask = torch.cat(
            [before[:, None, None].expand(n, 1, tokens, -1), own.expand(n, 1, tokens, tokens)], dim=-1
        )


@contextmanager
def shared_attention(decoder: Any, lengths: Tensor) -> Iterator[SharedPrefix]:
    """Inside, the attention layers of `decoder` first keep, then (`SharedPrefix.expect`) read the common tokens.

    Args:
        decoder: the text model, with its `config`.
        lengths: [B], common tokens of each sample, on the decoder's device.

    Raises:
        ModelError: an attention that cannot be shared.
    """
    kinds = set(getattr(decoder.config, "layer_types", None) or ()) - _ALIKE
    if kinds or getattr(decoder, "_is_stateful", False):
        raise ModelError("layers that are not attention cannot share a prefix: set prefix_sharing false")
    state = SharedPrefix(lengths)
    with exchanged_attention(decoder, state.attend, "set prefix_sharing false"):
        try:
            yield state
        finally:
            state.cached.clear()


def rest_of(ids: Tensor, lengths: Tensor, common: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What follows each sample's prefix, padded on the right.

    Args:
        ids: [B, T], padded on the right; lengths, common: [B], whole and common tokens.
        positions: [..., B, T] position ids.

    Returns:
        ids [B, S] and position ids [..., B, S]; padding is arbitrary.
    """
    size = int((lengths - common).max())
    places = common[:, None] + torch.arange(size, device=ids.device)
    places = places.clamp(max=ids.shape[1] - 1)
    return ids.gather(1, places), positions.gather(-1, places.expand(*positions.shape[:-1], size))
