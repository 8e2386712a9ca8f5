"""One training step of a Top-K SAE: a dense encoder product and a top-k; all else touches only the active features.

Loss (Gao et al. 2024, normalised as in OpenAI's sparse_autoencoder):

    L = mean_t ||x_t - x̂_t||² * mse_scale + c * Σ_t ||e_t - ê_t||² / Σ_t ||e_t - mean(e)||²,    e = x - x̂, held fixed,

where ê = z_aux W_dec (without bias) and z_aux are the k_aux largest ReLU activations among dead features. The second
term is 0 where e does not vary; its sums may run over every n-th token only (`AuxK.stride`).

With g = dL/dx̂ and G the sparse gradient of the codes: dW_dec = Zᵀ g and dW_enc = (x - b_dec)ᵀ G, both sums over the k
actives of each token; db_enc = Σ G; db_dec = Σ g - W_enc db_enc. No dense [tokens, d_sae] gradient is formed, and
pre-activations exist for about a thousand tokens at a time.
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
_ROWS = 1024
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


class Gradients(NamedTuple):
    """Of the loss by each parameter: W_enc as [d_sae, d_in], W_dec [d_sae, d_in], b_enc [d_sae], b_dec [d_in].

    `radial`: <dW_dec[j], W_dec[j]> of each feature, [d_sae], which comes for nothing on the way.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    radial: Tensor


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
    how = (mse_scale, aux, share, products)
    return StepOutput(*_Step.apply(coder, x, how, coder.W_enc, coder.b_enc, coder.W_dec, coder.b_dec))


@torch.no_grad()
def gradients(
    coder: TopKSAE,
    x: Tensor,
    mse_scale: float = 1.0,
    aux: AuxK | None = None,
    share: Share | None = None,
    products: torch.dtype | None = None,
    workspace: dict[str, Tensor] | None = None,
) -> tuple[StepOutput, Gradients]:
    """Loss of a batch and its gradients, without autograd; arguments as for `step`.

    `workspace` keeps the memory of pre-activations from call to call: fresh memory costs more than filling it.
    """
    share = share or Share(len(x), lambda tensor: tensor)
    if aux is not None and not len(aux.dead):
        aux = None
    centred = x - coder.b_dec
    values, indices, among = _encode(coder, centred, aux, products, {} if workspace is None else workspace)
    error = centred - F.embedding_bag(indices, coder.W_dec, mode="sum", per_sample_weights=values)
    scale = mse_scale / share.tokens
    mse = torch.linalg.vector_norm(error).square() * scale

    g = error * (-2.0 * scale)
    g_codes = _products(g, coder.W_dec, indices) * (values > 0)
    by_feature = _ByFeature(indices, coder.d_sae)
    # [d_sae, d_in]: the memory order of a feature-major W_enc
    dw_enc, dw_dec = by_feature.sum(g_codes, centred), by_feature.sum(values, g)
    totals = by_feature.totals(torch.stack([g_codes, values * g_codes], dim=-1))
    # rows of memory: AdamW's fast path reads gradients as if they had no gaps
    db_enc, radial = totals.t().contiguous().unbind()

    loss, aux_loss = mse, mse.new_zeros(())
    if aux is not None and among is not None:
        dead = coder.W_dec[aux.dead]
        z, g_aux, aux_loss = _auxiliary(among, error, dead, aux, share)
        g_z = (g_aux @ dead.t()).mul_(z > 0)
        dw_dec.index_add_(0, aux.dead, z.t() @ g_aux)
        dw_enc.index_add_(0, aux.dead, g_z.t() @ centred[:: aux.stride])
        db_enc = db_enc.index_add(0, aux.dead, g_z.sum(0))
        radial = radial.index_add(0, aux.dead, (z * g_z).sum(0))
        loss = mse + aux.coefficient * aux_loss
    db_dec = g.sum(0) - coder.W_enc @ db_enc
    return StepOutput(loss, mse, aux_loss, values, indices), Gradients(dw_enc, db_enc, dw_dec, db_dec, radial)


def feature_major(coder: TopKSAE) -> TopKSAE:
    """Store W_enc feature by feature (same shape and values), which is how its gradient comes out. In place."""
    coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().t().contiguous().t())
    return coder


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, coder: TopKSAE, x: Tensor, how: tuple[Any, ...], *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        out, found = gradients(coder, x, *how)
        ctx.save_for_backward(found.W_enc, found.b_enc, found.W_dec, found.b_dec)
        ctx.mark_non_differentiable(*out[1:])
        # a tensor of its own: without an auxiliary term the loss is the mse
        return out.loss.clone(), out.mse, out.aux, out.values, out.indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        w_enc, b_enc, w_dec, b_dec = ctx.saved_tensors
        return None, None, None, (w_enc * grad).t(), b_enc * grad, w_dec * grad, b_dec * grad


def _encode(
    coder: TopKSAE, centred: Tensor, aux: AuxK | None, products: torch.dtype | None, workspace: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """values, indices [N, k], and the pre-activations of dead features at every `stride`-th token."""
    exact = products is None or products == centred.dtype
    x, w, b = (part if exact else part.to(products) for part in (centred, coder.W_enc, coder.b_enc))
    stride = 1 if aux is None else aux.stride
    rows = _ROWS if x.device.type == "cpu" else max(_NUMBERS // len(b), 1)
    # chunks begin at tokens of the auxiliary term
    rows = min(math.ceil(rows / stride) * stride, len(x))
    values = centred.new_empty(len(x), coder.k)
    indices = torch.empty(len(x), coder.k, dtype=torch.int64, device=x.device)
    buffer = workspace.get("pre")
    if buffer is None or buffer.shape != (rows, len(b)) or buffer.dtype != x.dtype or buffer.device != x.device:
        buffer = workspace["pre"] = x.new_empty(rows, len(b))
    among = []
    for start in range(0, len(x), rows):
        chunk = slice(start, start + rows)
        pre = torch.addmm(b, x[chunk], w, out=buffer[: len(x[chunk])])
        values[chunk], indices[chunk] = largest(pre, coder.k)
        if aux is not None:
            among.append(pre[::stride].index_select(1, aux.dead))
    if not exact:
        values = _products(centred, coder.W_enc.t(), indices) + coder.b_enc[indices]
    return values.relu_(), indices, torch.cat(among).to(centred.dtype) if among else None


def _auxiliary(among: Tensor, error: Tensor, w_dead: Tensor, aux: AuxK, share: Share) -> tuple[Tensor, Tensor, Tensor]:
    """z_aux [n, n_dead], dL/dê [n, d_in], and the auxiliary loss without its coefficient.

    among: [n, n_dead] pre-activations of the dead features; error: [N, d_in]; w_dead: their rows of W_dec.
    """
    error = error[:: aux.stride]
    if aux.k < among.shape[-1]:
        top, where = among.topk(aux.k, dim=-1, sorted=False)
        z = torch.zeros_like(among).scatter_(-1, where, top.relu_())
    else:
        z = among.relu_()
    residual = z @ w_dead - error
    mean = share.total(error.sum(0)) / share.total(error.new_tensor(float(len(error))))
    spread = share.total((error - mean).square().sum())
    inverse = torch.where(spread > 0, 1 / spread, 0.0)
    loss = residual.square().sum() * inverse
    return z, residual.mul_(2 * aux.coefficient * inverse), loss


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
        """Σ_t weights[t, i] for every feature: [N, k, n] to [d_sae, n]."""
        entries = weights.reshape(-1, weights.shape[-1])
        return F.embedding_bag(self.order, entries, self.starts, mode="sum")


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
