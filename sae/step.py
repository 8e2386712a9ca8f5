"""Training steps of one coder: a dense encoder product and a top-k; all else touches only the active features.

Loss (Gao et al. 2024, normalised as in OpenAI's sparse_autoencoder):

    L = mean_t ||x_t - x̂_t||² * mse_scale + c * Σ_t ||e_t - ê_t||² / Σ_t ||e_t - mean(e)||²,    e = x - x̂, detached,

where ê = z_aux W_dec (without bias) and z_aux are the k_aux largest ReLU activations among dead features (AuxK). The
second term is 0 where e does not vary.

With g = dL/dx̂ and G the sparse gradient of the codes: dW_dec = Zᵀ g, dW_enc = (x - b_dec)ᵀ G, db_enc = Σ G and
db_dec = Σ g - W_enc db_enc, sums over the k actives of each token. No dense [tokens, d_sae] gradient is formed.
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

from sae.config import SAETrainConfig
from sae.errors import ActivationError
from sae.parallel import Processes
from sae.topk import TopKSAE, coder_of, largest

#: Tokens whose pre-activations exist at a time on a CPU, where they then stay in its cache; elsewhere by memory alone.
_ROWS = 1024
_NUMBERS = 1 << 27


class StepOutput(NamedTuple):
    """Losses and codes of a batch. values, indices: [N, k]; mse in units of `mse_scale`."""

    loss: Tensor
    mse: Tensor
    aux: Tensor
    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class AuxK:
    """The auxiliary loss over `dead` features [n], at most `k` per token."""

    dead: Tensor
    k: int
    coefficient: float = 1 / 32


class Gradients(NamedTuple):
    """Of the loss by each parameter, W_enc as [d_sae, d_in]; `radial` [d_sae] is <dW_dec[j], W_dec[j]>."""

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    radial: Tensor


@torch.no_grad()
def gradients(
    coder: TopKSAE,
    x: Tensor,
    mse_scale: float = 1.0,
    aux: AuxK | None = None,
    *,
    tokens: int | None = None,
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    products: torch.dtype | None = None,
) -> tuple[StepOutput, Gradients]:
    """Loss of a batch and its gradients, without autograd.

    Args:
        x: [N, d_in] in the dtype of the coder.
        mse_scale: factor of the reconstruction loss; aux: None, or no dead features: the auxiliary loss is 0.
        tokens: of the whole batch, over all processes, of whose losses and gradients these are summands; None: N.
        total: sums a tensor over all processes.
        products: precision of the encoder product alone, which decides what is active; the values are then computed
            again in the dtype of the coder. None: that dtype throughout.
    """
    if aux is not None and not len(aux.dead):
        aux = None
    centred = x - coder.b_dec
    values, indices, dead_pre = _encode(coder, centred, aux, products)
    error = centred - F.embedding_bag(indices, coder.W_dec, mode="sum", per_sample_weights=values)
    scale = mse_scale / (len(x) if tokens is None else tokens)
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
    if aux is not None and dead_pre is not None:
        dead = coder.W_dec[aux.dead]
        z, g_aux, aux_loss = _auxiliary(dead_pre, error, dead, aux, total)
        g_z = (g_aux @ dead.t()).mul_(z > 0)
        dw_dec.index_add_(0, aux.dead, z.t() @ g_aux)
        dw_enc.index_add_(0, aux.dead, g_z.t() @ centred)
        db_enc = db_enc.index_add(0, aux.dead, g_z.sum(0))
        radial = radial.index_add(0, aux.dead, (z * g_z).sum(0))
        loss = mse + aux.coefficient * aux_loss
    db_dec = g.sum(0) - coder.W_enc @ db_enc
    return StepOutput(loss, mse, aux_loss, values, indices), Gradients(dw_enc, db_enc, dw_dec, db_dec, radial)


def feature_major(coder: TopKSAE) -> TopKSAE:
    """Store W_enc feature by feature (same shape and values), in place: the memory order of its gradient."""
    coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().t().contiguous().t())
    return coder


def _encode(
    coder: TopKSAE, centred: Tensor, aux: AuxK | None, products: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """values, indices [N, k], and the pre-activations of dead features."""
    exact = products is None or products == centred.dtype
    x, w, b = (part if exact else part.to(products) for part in (centred, coder.W_enc, coder.b_enc))
    rows = min(_ROWS if x.device.type == "cpu" else max(_NUMBERS // len(b), 1), len(x))
    values = centred.new_empty(len(x), coder.k)
    indices = torch.empty(len(x), coder.k, dtype=torch.int64, device=x.device)
    buffer = x.new_empty(rows, len(b))
    dead_pre = []
    for start in range(0, len(x), rows):
        chunk = slice(start, start + rows)
        pre = torch.addmm(b, x[chunk], w, out=buffer[: len(x[chunk])])
        values[chunk], indices[chunk] = largest(pre, coder.k)
        if aux is not None:
            dead_pre.append(pre.index_select(1, aux.dead))
    if not exact:
        values = _products(centred, coder.W_enc.t(), indices) + coder.b_enc[indices]
    return values.relu_(), indices, torch.cat(dead_pre).to(centred.dtype) if dead_pre else None


def _auxiliary(
    pre: Tensor, error: Tensor, w_dead: Tensor, aux: AuxK, total: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """z_aux [n, n_dead], dL/dê [n, d_in] and the loss without coefficient; pre [n, n_dead], error [N, d_in]."""
    top, where = pre.topk(min(aux.k, pre.shape[-1]), dim=-1, sorted=False)
    z = torch.zeros_like(pre).scatter_(-1, where, top.relu_())
    residual = z @ w_dead - error
    mean = total(error.sum(0)) / total(error.new_tensor(float(len(error))))
    spread = total((error - mean).square().sum())
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
        warnings.simplefilter("ignore", UserWarning)
        pattern = torch.sparse_csr_tensor(
            starts, indices.reshape(-1), g.new_zeros(tokens * k), (tokens, len(w_dec)), check_invariants=False
        )
    return torch.sparse.sampled_addmm(pattern, g, w_dec.t()).values().view(tokens, k)


@dataclass
class LayerState:
    """All that changes while one layer trains, in training units: inputs are (h - mean) * scale.

    `optimizer` works on `stored(coder)`; `mse_scale` is 1 / variance of the inputs; `silent` [d_sae] counts tokens
    since each feature last fired.
    """

    coder: TopKSAE
    optimizer: torch.optim.AdamW
    scale: float
    mean: Tensor | None
    mse_scale: float
    silent: Tensor

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, from which `load` makes it again."""
        own = {"scale": self.scale, "mean": self.mean, "mse_scale": self.mse_scale, "silent": self.silent}
        return {**own, "coder": self.coder.state_dict(), "optimizer": self.optimizer.state_dict()}

    @classmethod
    def load(cls, state: dict[str, Any], config: SAETrainConfig) -> LayerState:
        """From a `state_dict`."""
        coder = feature_major(coder_of(state["coder"], config.k, {}, state["silent"].device))
        optimizer = make_optimizer(coder, config)
        optimizer.load_state_dict(state["optimizer"])
        return cls(coder, optimizer, state["scale"], state["mean"], state["mse_scale"], state["silent"])


def stored(coder: TopKSAE) -> dict[str, Tensor]:
    """The parameters as they lie in memory, W_enc as [d_sae, d_in]: the optimiser's fast path wants contiguous ones."""
    return {
        name: tensor.detach().t() if name == "W_enc" else tensor.detach() for name, tensor in coder.named_parameters()
    }


def start(h: Tensor, config: SAETrainConfig, layer: int) -> LayerState:
    """Create coder, normalisation and optimiser from the first raw activations [N, d_in] of all processes.

    Raises ActivationError for activations that are all equal.
    """
    d_in = h.shape[1]
    mean = h.mean(0) if config.normalise == "centre_scale" else None
    scale = 1.0
    if config.normalise != "none":
        norm = float(torch.linalg.vector_norm(h if mean is None else h - mean, dim=1).mean())
        scale = math.sqrt(d_in) / norm if norm > 0 else 1.0
    x = (h if mean is None else h - mean) * scale
    variance = float((x - x.mean(0)).square().sum(1).mean())
    if not variance > 0:
        raise ActivationError(f"layer {layer}: the first {len(h)} tokens are all equal; nothing can be learned")
    # one stream per layer, so that layers do not depend on one another
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + layer)
    coder = TopKSAE(d_in, config.d_sae, config.k, generator=generator).to(h)
    with torch.no_grad():
        _unit_rows(coder.W_dec)  # drawn in float32, exact in the dtype of training
        if config.b_dec_init != "zero":
            coder.b_dec.copy_(x.mean(0) if config.b_dec_init == "mean" else geometric_median(x))
        # the encoder's length is free: the one that fits the first tokens best, given the rest
        target = x - coder.b_dec
        guess = coder.decode(coder.encode(x)) - coder.b_dec
        coder.W_enc.mul_(float((guess * target).sum() / guess.square().sum()))
    feature_major(coder)
    silent = torch.zeros(config.d_sae, dtype=torch.int64, device=h.device)
    return LayerState(coder, make_optimizer(coder, config), scale, mean, 1 / variance, silent)


def make_optimizer(coder: TopKSAE, config: SAETrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(stored(coder).values()),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=0.0,
        fused=coder.W_enc.device.type in ("cpu", "cuda"),
    )


def train_step(
    state: LayerState,
    h: Tensor,
    tokens: int,
    seen: int,
    lr: float,
    config: SAETrainConfig,
    processes: Processes,
    log: bool,
) -> dict[str, float] | None:
    """One optimiser step on raw activations h [N, d_in], this process's part of a batch of `tokens`.

    `seen` counts the tokens of all batches including this one. With `log` it returns figures before the step (fvu
    pooled over the tokens, l0 their mean), and dead after it.
    """
    coder = state.coder
    x = (h if state.mean is None else h - state.mean) * state.scale
    aux = None
    # nothing can have been silent for longer than training has lasted
    if config.aux_coefficient > 0 and seen > config.dead_tokens:
        dead = (state.silent > config.dead_tokens).nonzero().squeeze(-1)
        k = 1 << max(0, (coder.d_in // 2).bit_length() - 1)
        aux = AuxK(dead, k, config.aux_coefficient)
    products = torch.bfloat16 if config.dtype == "bfloat16" else None
    out, grads = gradients(coder, x, state.mse_scale, aux, tokens=tokens, total=processes.total, products=products)
    for name, parameter in zip(stored(coder), state.optimizer.param_groups[0]["params"], strict=True):
        parameter.grad = processes.total(getattr(grads, name))
    with torch.no_grad():
        grads.W_dec.addcmul_(processes.total(grads.radial)[:, None], coder.W_dec, value=-1)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        _unit_rows(coder.W_dec)
        fired = torch.zeros(coder.d_sae, dtype=torch.int32, device=h.device)
        fired[out.indices[out.values > 0]] = 1
        state.silent.add_(tokens).masked_fill_(processes.total(fired) > 0, 0)
    if not log:
        return None
    mean = processes.total(x.sum(0)) / tokens
    sums = torch.stack(
        [out.loss, out.aux, out.mse, (x - mean).square().sum() / tokens, (out.values > 0).sum() / tokens]
    )
    loss, aux, mse, spread, l0 = processes.total(sums.double()).tolist()
    return {
        "loss": loss,
        "aux": aux,
        "fvu": mse / state.mse_scale / spread if spread > 0 else float("nan"),
        "l0": l0,
        "dead": float((state.silent > config.dead_tokens).double().mean()),
        "lr": lr,
    }


def _unit_rows(w: Tensor) -> None:
    w.div_(torch.linalg.vector_norm(w, dim=1, keepdim=True))


def geometric_median(x: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Tensor:
    """The point with the least sum of distances to the rows of x, [N, d] to [d], by Weiszfeld's iteration."""
    point = x.mean(0)
    for _ in range(iterations):
        weight = 1 / torch.linalg.vector_norm(x - point, dim=1).clamp(min=1e-12)
        after = (weight @ x) / weight.sum()
        moved = torch.linalg.vector_norm(after - point)
        point = after
        if float(moved) <= tolerance * max(float(torch.linalg.vector_norm(point)), 1e-12):
            break
    return point
