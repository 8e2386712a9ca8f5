"""SAEs whose features have a threshold each (JumpReLU), to read: standard, gated and batch-top-k SAEs are such, too."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from sae.errors import ShapeError
from sae.topk import TopKSAE


class JumpReLUSAE(TopKSAE):
    """An SAE whose feature j is active where its pre-activation exceeds `threshold[j]`, as many features as there are.

    z_j = pre_j 1[pre_j > max(threshold_j, 0)] with pre = (h - b_dec) W_enc + b_enc (Rajamanoharan et al. 2024, Eq. 3).
    A ReLU SAE has thresholds of 0; a gated one with shared weights is a JumpReLU (ibid., Appendix E), and so is one
    trained with batch-top-k, at inference. Everything else is as in `TopKSAE`, and codes have k entries a token here,
    too: of a token with more active features the k largest are kept, with a warning.

    Args:
        d_in, d_sae: as in `TopKSAE`.
        k: entries of a token's codes.
        threshold: [d_sae], in units of pre-activations.
    """

    def __init__(self, d_in: int, d_sae: int, k: int, threshold: Tensor) -> None:
        super().__init__(d_in, d_sae, k)
        if threshold.shape != (d_sae,):
            raise ShapeError(f"threshold {list(threshold.shape)} must be [{d_sae}]")
        self.threshold = nn.Parameter(threshold, requires_grad=False)

    def activate(self, pre: Tensor) -> Tensor:
        active = pre > self.threshold.clamp(min=0)
        most = int(active.sum(-1).max()) if len(pre) else 0
        if most > self.k:
            warnings.warn(
                f"{most} features are active at a token; the {self.k} largest are kept: load the SAE with a larger k",
                stacklevel=2,
            )
        return torch.where(active, pre, 0)
