"""Small operations on sparse codes that the equations share."""

from __future__ import annotations

from collections.abc import Sequence

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


def split_codes(codes: SparseCodes, sizes: Sequence[int]) -> list[SparseCodes]:
    """Split [T, k] into consecutive pieces."""
    pairs = zip(codes.values.split(list(sizes)), codes.indices.split(list(sizes)), strict=True)
    return [SparseCodes(values, indices) for values, indices in pairs]


def join_codes(parts: Sequence[SparseCodes]) -> SparseCodes:
    """Concatenate several [·, k]."""
    return SparseCodes(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))
