"""What the strategy asks for, as weights over SAE features (Eq. 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from sae import SparseCodes


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
    # imported here, so that the package, which holds this function under the module's name, opens without torch
    import torch

    from remind.grounding.features import active_features, working_dtype

    if idf.dim() != 1 or not idf.is_floating_point():
        raise ConfigError(f"idf must be a vector of floats, got shape {tuple(idf.shape)} of {idf.dtype}")
    d_sae = idf.shape[0]
    dtype = working_dtype(idf.dtype)
    reason_counts, anchor_counts = (
        torch.bincount(active_features(codes, d_sae), minlength=d_sae).to(idf.device, dtype)
        for codes in (reason, anchors)
    )
    weights = idf.to(dtype)
    anchored = alpha * anchor_counts
    return torch.maximum(weights * reason_counts, anchored * weights if anchor_idf else anchored).to(idf.dtype)
