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
    where = _Where(positions)
    edits: dict[int, Callable[[Tensor], Tensor]] = {
        layer: _Edit(coders[layer], _strengths(layer, coders[layer], strengths, mode), mode, relative, where)
        for layer, strengths in features.items()
    }
    # before the edits, so that a forward's positions are known when the first of them runs
    handle = hooks.find_blocks(model)[0].register_forward_pre_hook(where.read_cache, with_kwargs=True)
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


class _Where:
    """Which tokens of the current forward are edited."""

    def __init__(self, positions: Positions | None) -> None:
        self._positions = positions
        self._past = 0

    def read_cache(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of the first block: count the tokens in the cache."""
        caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
        self._past = int(caches[0].get_seq_length()) if caches else 0

    def __call__(self, h: Tensor) -> Tensor:
        """[B, T] bool for h [B, T, d]."""
        shape = h.shape[:2]
        if self._positions is None:
            return torch.ones(shape, dtype=torch.bool, device=h.device)
        mask = self._positions(torch.arange(self._past, self._past + shape[1], device=h.device))
        if mask.dtype != torch.bool or mask.shape not in (shape, shape[1:]):
            raise ShapeError(f"positions gave {mask.dtype} {list(mask.shape)}: must be bool [T] or {list(shape)}")
        return mask.to(h.device).expand(shape)


class _Edit:
    """The edit of one layer, [B, T, d] to [B, T, d]."""

    def __init__(
        self, coder: TopKSAE, strengths: Mapping[int, float], mode: Mode, relative: bool, where: _Where
    ) -> None:
        self._coder, self._mode, self._relative, self._where = coder, mode, relative, where
        device = coder.W_dec.device
        self._features = torch.tensor(list(strengths), dtype=torch.int64, device=device)
        self._strengths = torch.tensor(list(strengths.values()), dtype=torch.float64, device=device)

    def __call__(self, h: Tensor) -> Tensor:
        mask = self._where(h)
        dtype = torch.promote_types(h.dtype, self._coder.W_dec.dtype)
        chosen = h[mask].to(self._coder.W_dec.device, dtype)
        rows, strengths = self._coder.W_dec[self._features].to(dtype), self._strengths.to(dtype)
        if self._mode == "add":
            if self._relative:
                after = chosen + torch.linalg.vector_norm(chosen, dim=-1, keepdim=True) * (
                    strengths @ F.normalize(rows, dim=-1)
                )
            else:
                after = chosen + strengths @ rows
        else:
            current = self._coder.encode(chosen).of(self._features, self._coder.d_sae)
            missing = strengths - current.to(dtype)
            # adding 0 may still change the sign of a zero
            after = torch.where((missing != 0).any(-1, keepdim=True), chosen + missing @ rows, chosen)
        out = h.clone()
        out[mask] = after.to(h)
        return out


def _strengths(
    layer: int, coder: TopKSAE, features: Mapping[int, float] | Collection[int], mode: Mode
) -> dict[int, float]:
    if mode == "ablate":
        features = dict.fromkeys(features, 0.0)
    if not isinstance(features, Mapping):
        raise ConfigError(f"layer {layer}: mode {mode!r} needs a strength for each feature: {{feature: strength}}")
    strengths: dict[int, float] = {}
    for feature, strength in features.items():
        number = -1 if isinstance(feature, bool) or not hasattr(feature, "__index__") else feature.__index__()
        if not 0 <= number < coder.d_sae:
            raise ConfigError(f"layer {layer}: feature {feature!r} does not exist; there are 0 to {coder.d_sae - 1}")
        try:
            strengths[number] = float(strength)
        except (TypeError, ValueError):
            strengths[number] = math.nan
        if not math.isfinite(strengths[number]):
            raise ConfigError(f"layer {layer}, feature {number}: strength {strength!r} is not a finite number")
    return strengths
