"""Another attention in a model for a while, by transformers' registry: to share keys, or to read weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from remind.core.errors import ModelError

_log = logging.getLogger(__name__)
NAME = "remind_attention"

#: As transformers': (module, query [B, heads, S, d], key and value [B, key heads, T, d], mask, further arguments) to
#: output and weights. What stands in its place is given the model's own as a first argument.
Attention = Callable[..., tuple[Tensor, Tensor | None]]

#: Name of the model's own, what stands in its place, and what to do without.
_active: ContextVar[tuple[str, Attention, str]] = ContextVar(NAME)


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner, attention, otherwise = _active.get()
    for name in ("sliding_window", "s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise ModelError(f"attention with {name} cannot be replaced: {otherwise}")
    return attention(ALL_ATTENTION_FUNCTIONS[inner], module, *args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if kwargs.get("local_size") is not None:
        raise ModelError(f"attention in windows or chunks cannot be replaced: {_active.get()[2]}")
    return ALL_MASK_ATTENTION_FUNCTIONS[_active.get()[0]](*args, **kwargs)


@contextmanager
def exchanged_attention(decoder: Any, attention: Attention, otherwise: str) -> Iterator[None]:
    """Inside, the layers of `decoder` attend by `attention(their own, ...)`.

    On leaving, their own is put back, so that checkpointed layers are computed again in the backward pass by it.

    Args:
        decoder: the text model, with its `config`.
        otherwise: what to do where that is impossible, for the message of the error.

    Raises:
        ModelError: an attention that is not in the registry; in the forward, one with a window, sinks or a cap.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    config = decoder.config
    inner = config._attn_implementation
    if inner not in ALL_ATTENTION_FUNCTIONS:
        raise ModelError(f"attention {inner!r} cannot be replaced: load the model with sdpa, or {otherwise}")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    token = _active.set((inner, attention, otherwise))
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = inner
        _active.reset(token)


@torch.no_grad()
def attends_alone(decoder: Any, otherwise: str) -> bool:
    """Whether tokens know of earlier ones by an attention that can be exchanged and by nothing else: convolutions and
    layers that carry a state do not. Where they do not, the log says so.

    Each token attends to itself alone, and all but the last are NaN: where another layer mixes tokens, so is the last.

    Args:
        decoder, otherwise: as for `exchanged_attention`.
    """

    def itself(_: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *a: Any, **kw: Any) -> Any:
        heads = query.shape[1] // value.shape[1]
        return value.repeat_interleave(heads, 1).transpose(1, 2).contiguous(), None

    embedded = decoder.get_input_embeddings()(torch.zeros(1, 4, dtype=torch.long, device=decoder.device)).clone()
    embedded[:, :-1] = torch.nan
    try:
        with exchanged_attention(decoder, itself, otherwise):
            states = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        if bool(states[:, -1].isfinite().all()):
            return True
        _log.warning("%s has layers that are not attention: %s", type(decoder).__name__, otherwise)
    except ModelError as error:
        _log.warning("%s: %s", type(decoder).__name__, error)
    return False
