"""Steering: add features to the residual stream, hold them at a value, or take them out, while the model runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import hooks
from sae.errors import ConfigError, LayerError, ShapeError
from sae.probe.encoder import check_coders
from sae.topk import TopKSAE

Mode = Literal["add", "set", "ablate"]
#: From the positions of a forward, [T] int64, to which of them are edited, bool [T] or [B, T].
Positions = Callable[[Tensor], Tensor]


@contextmanager
def steer(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    features: Mapping[int, Mapping[int, float] | Collection[int]],
    mode: Mode = "add",
    *,
    relative: bool = False,
    positions: Positions | None = None,
) -> Iterator[None]:
    """Within the block every forward of the model, including `generate`, runs on an edited residual stream.

    With h the stream at a token of layer L and z = coder.encode(h) (z_j = 0 where j is inactive):

    - "add": h + Σ_j s_j W_dec[j], whether j is active or not, s_j in the units of the codes. With `relative`:
      h + ‖h‖ Σ_j s_j W_dec[j] / ‖W_dec[j]‖, s_j in shares of the norm of the token's own h.
    - "set": h + Σ_j (s_j - z_j) W_dec[j], every token; what the coder cannot reconstruct (h - ĥ) stays. Encoding the
      result again need not give s_j back. s_j may be negative.
    - "ablate": "set" with s_j = 0. A token where none of the features is active keeps its h bit for bit.

    Edits of several layers see the effect of the edits below them; nested blocks at one layer act from the outside in.

    Args:
        model: a Hugging Face model, with or without its head.
        coders: layer to coder; those of the layers edited are used.
        features: layer to {feature: strength s_j}; for "ablate" a collection of features is enough.
        mode, relative: see above.
        positions: which tokens are edited, from their positions; None: all. Positions count from 0, with padding on the
            left and cached tokens: `lambda at: at >= n` edits what `generate` adds to a prompt of n tokens.

    Raises:
        LayerError: a layer the model or `coders` does not have, or none.
        ConfigError: a feature that does not exist, a strength that is not finite, or options that do not fit together.
        ShapeError: a coder of another width; in the forward: positions that are not bool [T] or [B, T].
    """
    for layer in features:
        if layer not in coders:
            raise LayerError(f"layer {layer} has no coder; there are coders of {sorted(coders)}")
    check_coders(model, {layer: coders[layer] for layer in features})
    if mode not in ("add", "set", "ablate"):
        raise ConfigError(f"mode {mode!r}: must be 'add', 'set' or 'ablate'")
    if relative and mode != "add":
        raise ConfigError(f"relative strengths go with mode 'add', not {mode!r}")
    past = 0

    def read_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal past
        caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
        past = int(caches[0].get_seq_length()) if caches else 0

    def where(h: Tensor) -> Tensor:
        """Which tokens of h [B, T, d] are edited, [B, T] bool."""
        shape = h.shape[:2]
        if positions is None:
            return torch.ones(shape, dtype=torch.bool, device=h.device)
        mask = positions(torch.arange(past, past + shape[1], device=h.device))
        if mask.dtype != torch.bool or mask.shape not in (shape, shape[1:]):
            raise ShapeError(f"positions gave {mask.dtype} {list(mask.shape)}: must be bool [T] or {list(shape)}")
        return mask.to(h.device).expand(shape)

    edits = {
        layer: _edit(coders[layer], _strengths(layer, coders[layer], wanted, mode), mode, relative, where)
        for layer, wanted in features.items()
    }
    # before the edits, so that a forward's positions are known when the first of them runs
    handle = hooks.find_blocks(model)[0].register_forward_pre_hook(read_cache, with_kwargs=True)
    try:
        with hooks.edited(model, edits):
            yield
    finally:
        handle.remove()


@contextmanager
def ablate(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    features: Mapping[int, Collection[int]],
    *,
    positions: Positions | None = None,
) -> Iterator[None]:
    """`steer` with mode "ablate": h - Σ_j z_j W_dec[j] over the features of each layer, only where they are active."""
    with steer(model, coders, features, "ablate", positions=positions):
        yield


def _edit(
    coder: TopKSAE, wanted: Mapping[int, float], mode: Mode, relative: bool, where: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The edit of one layer, [B, T, d] to [B, T, d]."""
    device = coder.W_dec.device
    features = torch.tensor(list(wanted), dtype=torch.int64, device=device)
    wanted_values = torch.tensor(list(wanted.values()), dtype=torch.float64, device=device)

    def edit(h: Tensor) -> Tensor:
        mask = where(h)
        dtype = torch.promote_types(h.dtype, coder.W_dec.dtype)
        chosen, rows, strengths = h[mask].to(device, dtype), coder.W_dec[features].to(dtype), wanted_values.to(dtype)
        if relative:
            norms = torch.linalg.vector_norm(chosen, dim=-1, keepdim=True)
            after = chosen + norms * (strengths @ F.normalize(rows, dim=-1))
        elif mode == "add":
            after = chosen + strengths @ rows
        else:
            missing = strengths - coder.encode(chosen).of(features, coder.d_sae).to(dtype)
            # adding 0 may still change the sign of a zero
            after = torch.where((missing != 0).any(-1, keepdim=True), chosen + missing @ rows, chosen)
        out = h.clone()
        out[mask] = after.to(h)
        return out

    return edit


def _strengths(
    layer: int, coder: TopKSAE, features: Mapping[int, float] | Collection[int], mode: Mode
) -> dict[int, float]:
    if mode == "ablate":
        features = dict.fromkeys(features, 0.0)
    if not isinstance(features, Mapping):
        raise ConfigError(f"layer {layer}: mode {mode!r} needs a strength for each feature: {{feature: strength}}")
    for feature, strength in features.items():
        if not 0 <= feature < coder.d_sae:
            raise ConfigError(f"layer {layer}: feature {feature!r} does not exist; there are 0 to {coder.d_sae - 1}")
        if not math.isfinite(strength):
            raise ConfigError(f"layer {layer}, feature {feature}: strength {strength!r} is not a finite number")
    return {int(feature): float(strength) for feature, strength in features.items()}
