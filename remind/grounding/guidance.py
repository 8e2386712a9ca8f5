"""What the strategy asks for, as weights over SAE features (Eq. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from sae import SparseCodes


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of `dtypes`, at least float32: sums over thousands of tokens overrun half precision."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def flat(codes: SparseCodes) -> tuple[Tensor, Tensor]:
    """Values and indices as [T, k], whatever the leading dimensions."""
    k = codes.indices.shape[-1]
    return codes.values.reshape(-1, k), codes.indices.reshape(-1, k)


def active_features(codes: SparseCodes, d_sae: int) -> Tensor:
    """Indices of all active (token, feature) pairs, one entry per pair; int64 [n].

    Raises:
        ConfigError: an index that is no feature of an SAE with `d_sae` features.
    """
    values, indices = flat(codes)
    chosen = indices[values > 0]
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < d_sae):
        raise ConfigError(f"codes name feature {int(chosen.max())}, but there are weights for {d_sae} features")
    return chosen


def guidance(
    reason: SparseCodes, anchors: SparseCodes, idf: Tensor, alpha: float = 6.0, *, anchor_idf: bool = False
) -> Tensor:
    """v_guide of Eq. 3: `v[j] = max(idf[j] * count_reason[j], alpha * count_anchor[j])`.

    A feature counts once for every token in which it is active (value > 0).

    Args:
        reason, anchors: codes [T, k] of the tokens in T_reason and T_anchor; T may be 0.
        idf: w_idf [d_sae], floating.
        alpha: how much more an anchor token weighs than a reasoning token.
        anchor_idf: weigh anchors by idf too (`alpha * idf[j] * count_anchor[j]`); the paper does not.

    Returns:
        [d_sae] in the dtype and on the device of `idf`.

    Raises:
        ConfigError: idf is not a vector of floats, or the codes name a feature it has no weight for.
    """
    if idf.dim() != 1 or not idf.is_floating_point():
        raise ConfigError(f"idf must be a vector of floats, got shape {tuple(idf.shape)} of {idf.dtype}")
    d_sae = idf.shape[0]
    dtype = working_dtype(idf.dtype)
    counts = [
        torch.bincount(active_features(codes, d_sae), minlength=d_sae).to(idf.device, dtype)
        for codes in (reason, anchors)
    ]
    weights = idf.to(dtype)
    anchored = alpha * counts[1]
    return torch.maximum(weights * counts[0], anchored * weights if anchor_idf else anchored).to(idf.dtype)
