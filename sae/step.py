"""One training step of a Top-K SAE: a dense encoder product and a top-k; all else touches only the active features.

Loss (Gao et al. 2024, normalised as in OpenAI's sparse_autoencoder):

    L = mean_t ||x_t - x̂_t||² * mse_scale + c * Σ_t ||e_t - ê_t||² / Σ_t ||e_t - mean(e)||²,    e = x - x̂, held fixed,

where ê = z_aux W_dec (without bias) and z_aux are the k_aux largest ReLU activations among dead features. The second
term is 0 where e does not vary; its sums may run over every n-th token only (`AuxK.stride`).

With g = dL/dx̂ and G the sparse gradient of the codes: dW_dec = Zᵀ g and dW_enc = (x - b_dec)ᵀ G, both sums over the k
actives of each token; db_enc = Σ G; db_dec = Σ g - W_enc db_enc. No dense [tokens, d_sae] gradient is formed, and
pre-activations exist for a few hundred tokens at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sae.topk import TopKSAE, largest

#: Tokens whose pre-activations exist at a time on a CPU, where they then stay in its cache; elsewhere by memory alone.
_ROWS = 512
_NUMBERS = 1 << 27


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
        stride: the term takes every so many-th token of the batch, from the first.
    """

    dead: Tensor
    k: int
    coefficient: float = 1 / 32
    stride: int = 1


@dataclass(frozen=True)
class Share:
    """What part of a batch this process has.

    Attributes:
        tokens: of the whole batch, over all processes.
        total: sums a tensor over all processes.
    """

    tokens: int
    total: Callable[[Tensor], Tensor]


def step(
    coder: TopKSAE,
    x: Tensor,
    mse_scale: float = 1.0,
    aux: AuxK | None = None,
    share: Share | None = None,
    products: torch.dtype | None = None,
) -> StepOutput:
    """Loss of a batch; `.loss.backward()` gives the gradients of the four parameters.

    Fastest where `coder.W_enc` is stored feature by feature (see `feature_major`).

    Args:
        x: [N, d_in] in the dtype of the coder; gets no gradient.
        mse_scale: factor of the reconstruction loss, e.g. 1 / variance.
        aux: None, or no dead features: the auxiliary term is 0.
        share: None: x is the whole batch. Otherwise losses and gradients are this process's summands of the batch's.
        products: precision of the encoder product alone, e.g. bfloat16; it decides which features are active. Their
            values are then computed anew in the dtype of the coder. None: that dtype throughout.
    """
    if aux is not None and not len(aux.dead):
        aux = None
    how = _How(coder.k, mse_scale, aux, share or Share(len(x), lambda tensor: tensor), products)
    return StepOutput(*_Step.apply(x, coder.W_enc, coder.b_enc, coder.W_dec, coder.b_dec, how))


def feature_major(coder: TopKSAE) -> TopKSAE:
    """Store W_enc feature by feature (same shape and values), which is how its gradient comes out. In place."""
    coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().t().contiguous().t())
    return coder


class _How(NamedTuple):
    k: int
    mse_scale: float
    aux: AuxK | None
    share: Share
    products: torch.dtype | None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_enc: Tensor, b_enc: Tensor, w_dec: Tensor, b_dec: Tensor, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        centred = x - b_dec
        values, indices, among = _encode(centred, w_enc, b_enc, how)
        error = centred - F.embedding_bag(indices, w_dec, mode="sum", per_sample_weights=values)
        ctx.scale = how.mse_scale / how.share.tokens
        mse = error.square().sum() * ctx.scale
        ctx.aux, aux_loss = None, mse.new_zeros(())
        if how.aux is not None and among is not None:
            ctx.aux, aux_loss = _aux_forward(among, error, w_dec, how.aux, how.share)
        ctx.save_for_backward(centred, error, values, indices, w_enc, w_dec)
        ctx.mark_non_differentiable(mse, aux_loss, values, indices)
        coefficient = 0.0 if how.aux is None else how.aux.coefficient
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
            aux, z, g_aux = ctx.aux
            g_aux = g_aux * grad
            g_z = (g_aux @ w_dec[aux.dead].t()).mul_(z > 0)
            dw_dec.index_add_(0, aux.dead, z.t() @ g_aux)
            dw_enc.index_add_(0, aux.dead, g_z.t() @ centred[:: aux.stride])
            db_enc.index_add_(0, aux.dead, g_z.sum(0))
        db_dec = g.sum(0) - w_enc @ db_enc
        return None, dw_enc.t(), db_enc, dw_dec, db_dec, None


def _encode(centred: Tensor, w_enc: Tensor, b_enc: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor | None]:
    """values, indices [N, k], and the pre-activations of dead features at every `stride`-th token."""
    exact = how.products is None or how.products == centred.dtype
    x, w, b = (centred, w_enc, b_enc) if exact else (t.to(how.products) for t in (centred, w_enc, b_enc))
    stride = 1 if how.aux is None else how.aux.stride
    rows = _ROWS if x.device.type == "cpu" else max(_NUMBERS // len(b), 1)
    # chunks begin at tokens of the auxiliary term
    rows = min(math.ceil(rows / stride) * stride, len(x))
    values = centred.new_empty(len(x), how.k)
    indices = torch.empty(len(x), how.k, dtype=torch.int64, device=x.device)
    buffer = x.new_empty(rows, len(b))
    among = []
    for start in range(0, len(x), rows):
        chunk = slice(start, start + rows)
        pre = torch.addmm(b, x[chunk], w, out=buffer[: len(x[chunk])])
        top, indices[chunk] = largest(pre, how.k)
        values[chunk] = top
        if how.aux is not None:
            among.append(pre[::stride].index_select(1, how.aux.dead))
    if not exact:
        values = _products(centred, w_enc.t(), indices) + b_enc[indices]
    return values.relu_(), indices, torch.cat(among).to(centred.dtype) if among else None


def _aux_forward(
    among: Tensor, error: Tensor, w_dec: Tensor, aux: AuxK, share: Share
) -> tuple[tuple[AuxK, Tensor, Tensor], Tensor]:
    """(aux, z_aux [n, n_dead], dL/dê [n, d_in]) for backward, and the auxiliary loss without its coefficient."""
    error = error[:: aux.stride]
    if aux.k < among.shape[-1]:
        top, where = among.topk(aux.k, dim=-1, sorted=False)
        z = torch.zeros_like(among).scatter_(-1, where, top.relu_())
    else:
        z = among.relu_()
    residual = z @ w_dec[aux.dead] - error
    mean = share.total(error.sum(0)) / share.total(error.new_tensor(float(len(error))))
    spread = share.total((error - mean).square().sum())
    inverse = torch.where(spread > 0, 1 / spread, 0.0)
    loss = residual.square().sum() * inverse
    return (aux, z, residual.mul_(2 * aux.coefficient * inverse)), loss


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
