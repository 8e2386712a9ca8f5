"""One training step of a Top-K SAE: a dense encoder product and a top-k; all else touches only the active features.

Loss (Gao et al. 2024, normalised as in OpenAI's sparse_autoencoder):

    L = mean_t ||x_t - x̂_t||² * mse_scale + c * Σ_t ||e_t - ê_t||² / Σ_t ||e_t - mean(e)||²,    e = x - x̂, held fixed,

where ê = z_aux W_dec (without bias) and z_aux are the k_aux largest ReLU activations among dead features. The second
term is 0 where e does not vary.

With g = dL/dx̂ and G the sparse gradient of the codes: dW_dec = Zᵀ g and dW_enc = (x - b_dec)ᵀ G, both sums over the k
actives of each token; db_enc = Σ G; db_dec = Σ g - W_enc db_enc. No dense [tokens, d_sae] gradient is formed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sae.topk import TopKSAE


class StepOutput(NamedTuple):
    """`loss` carries the gradient; the rest is detached. values, indices: [N, k]; mse in units of `mse_scale`."""

    loss: Tensor
    mse: Tensor
    aux: Tensor
    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class AuxK:
    """Which features are dead, and how they share in the loss.

    Attributes:
        dead: [n] int64, distinct features.
        k: at most this many of them per token.
        coefficient: c of the loss.
    """

    dead: Tensor
    k: int
    coefficient: float = 1 / 32


def step(coder: TopKSAE, x: Tensor, mse_scale: float = 1.0, aux: AuxK | None = None) -> StepOutput:
    """Loss of a batch; `.loss.backward()` gives the gradients of the four parameters.

    Fastest where `coder.W_enc` is stored feature by feature (see `feature_major`).

    Args:
        x: [N, d_in] in the dtype of the coder; gets no gradient.
        mse_scale: factor of the reconstruction loss, e.g. 1 / variance.
        aux: None, or no dead features: the auxiliary term is 0.
    """
    if aux is not None and not len(aux.dead):
        aux = None
    return StepOutput(*_Step.apply(x, coder.W_enc, coder.b_enc, coder.W_dec, coder.b_dec, coder.k, mse_scale, aux))


def feature_major(coder: TopKSAE) -> TopKSAE:
    """Store W_enc feature by feature (same shape and values), which is how its gradient comes out. In place."""
    coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().t().contiguous().t())
    return coder


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_enc: Tensor,
        b_enc: Tensor,
        w_dec: Tensor,
        b_dec: Tensor,
        k: int,
        mse_scale: float,
        aux: AuxK | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        centred = x - b_dec
        pre = torch.addmm(b_enc, centred, w_enc)
        values, indices = pre.topk(k, dim=-1, sorted=False)
        values = values.relu_()
        error = centred - F.embedding_bag(indices, w_dec, mode="sum", per_sample_weights=values)
        ctx.scale = mse_scale / len(x)
        mse = error.square().sum() * ctx.scale
        ctx.aux, aux_loss = None, mse.new_zeros(())
        if aux is not None:
            ctx.aux, aux_loss = _aux_forward(pre, error, w_dec, aux)
        ctx.save_for_backward(centred, error, values, indices, w_enc, w_dec)
        ctx.mark_non_differentiable(mse, aux_loss, values, indices)
        coefficient = 0.0 if aux is None else aux.coefficient
        return mse + coefficient * aux_loss, mse, aux_loss, values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        centred, error, values, indices, w_enc, w_dec = ctx.saved_tensors
        g = error * (-2.0 * ctx.scale * grad)
        g_codes = _products(g, w_dec, indices) * (values > 0)
        by_feature = _ByFeature(indices, len(w_dec))
        dw_dec = by_feature.sum(values, g)
        # [d_sae, d_in]: the memory order of a feature-major W_enc
        dw_enc = by_feature.sum(g_codes, centred)
        db_enc = by_feature.totals(g_codes)
        if ctx.aux is not None:
            dead, z, g_aux = ctx.aux
            g_aux = g_aux * grad
            g_z = (g_aux @ w_dec[dead].t()).mul_(z > 0)
            dw_dec.index_add_(0, dead, z.t() @ g_aux)
            dw_enc.index_add_(0, dead, g_z.t() @ centred)
            db_enc.index_add_(0, dead, g_z.sum(0))
        db_dec = g.sum(0) - w_enc @ db_enc
        return None, dw_enc.t(), db_enc, dw_dec, db_dec, None, None, None


def _aux_forward(pre: Tensor, error: Tensor, w_dec: Tensor, aux: AuxK) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """(dead, z_aux [N, n_dead], dL/dê [N, d_in]) for backward, and the auxiliary loss without its coefficient."""
    among = pre[:, aux.dead]
    if aux.k < among.shape[-1]:
        top, where = among.topk(aux.k, dim=-1, sorted=False)
        z = torch.zeros_like(among).scatter_(-1, where, top.relu_())
    else:
        z = among.relu_()
    residual = z @ w_dec[aux.dead] - error
    spread = (error - error.mean(0)).square().sum()
    inverse = torch.where(spread > 0, 1 / spread, 0.0)
    loss = residual.square().sum() * inverse
    return (aux.dead, z, residual.mul_(2 * aux.coefficient * inverse)), loss


class _ByFeature:
    """The active entries of a batch, sorted by feature, for sums over the tokens that use each feature."""

    def __init__(self, indices: Tensor, d_sae: int) -> None:
        flat = indices.reshape(-1)
        features, self.order = flat.sort(stable=True)
        self.tokens = self.order // indices.shape[-1]
        self.starts = torch.searchsorted(features, torch.arange(d_sae, device=flat.device))

    def sum(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Σ_t weights[t, i] rows[t] for every feature: weights [N, k], rows [N, d] to [d_sae, d]."""
        sorted_weights = weights.reshape(-1)[self.order]
        return F.embedding_bag(self.tokens, rows, self.starts, mode="sum", per_sample_weights=sorted_weights)

    def totals(self, weights: Tensor) -> Tensor:
        """Σ_t weights[t, i] for every feature, [d_sae]."""
        return self.sum(weights, weights.new_ones(len(weights), 1)).squeeze(-1)


def _products(g: Tensor, w_dec: Tensor, indices: Tensor) -> Tensor:
    """<g_t, W_dec[j]> for the features j of each token only: [N, k]."""
    tokens, k = indices.shape
    starts = torch.arange(0, tokens * k + 1, k, device=g.device)
    with warnings.catch_warnings():
        # CSR tensors announce that they are in beta, once per process
        warnings.simplefilter("ignore", UserWarning)
        pattern = torch.sparse_csr_tensor(
            starts, indices.reshape(-1), g.new_zeros(tokens * k), (tokens, len(w_dec)), check_invariants=False
        )
    return torch.sparse.sampled_addmm(pattern, g, w_dec.t()).values().view(tokens, k)
