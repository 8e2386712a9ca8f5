"""One coder while it trains: its start, its optimiser step and its figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sae.config import SAETrainConfig
from sae.errors import ActivationError
from sae.parallel import Processes
from sae.step import AuxK, Share, StepOutput, feature_major, gradients
from sae.topk import TopKSAE


@dataclass
class LayerState:
    """All that changes while one layer trains.

    Attributes:
        coder: parameters in training units (inputs are (h - mean) * scale).
        optimizer: over `stored(coder)`.
        mse_scale: 1 / variance of the normalised inputs.
        silent: [d_sae] int64, tokens since each feature last fired.
    """

    coder: TopKSAE
    optimizer: torch.optim.AdamW
    scale: float
    mean: Tensor | None
    mse_scale: float
    silent: Tensor


def stored(coder: TopKSAE) -> dict[str, Tensor]:
    """The parameters as they lie in memory, sharing it: W_enc [d_sae, d_in], the others as they are.

    The optimiser works on these, since its fast path copies what is not contiguous.
    """
    return {
        name: tensor.detach().t() if name == "W_enc" else tensor.detach() for name, tensor in coder.named_parameters()
    }


def start(h: Tensor, config: SAETrainConfig, layer: int) -> LayerState:
    """A coder, its normalisation and its optimiser, from the first raw activations [N, d_in] of all processes.

    Raises:
        ActivationError: activations that are all equal.
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
        raise ActivationError(
            f"layer {layer}: the first {len(h)} tokens are all equal; nothing can be learned from them"
        )
    # each layer its own stream, so that a layer comes out the same whichever others train beside it
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + layer)
    coder = TopKSAE(d_in, config.d_sae, config.k, generator=generator).to(h)
    with torch.no_grad():
        _unit_rows(coder.W_dec)  # drawn in float32, exact in the dtype of training
        if config.b_dec_init != "zero":
            coder.b_dec.copy_(x.mean(0) if config.b_dec_init == "mean" else geometric_median(x))
        # the encoder's length is free: the one that suits the first tokens best, given the rest
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
        weight_decay=config.weight_decay,
        fused=coder.W_enc.device.type in ("cpu", "cuda"),
    )


def train_step(
    one: LayerState,
    h: Tensor,
    tokens: int,
    seen: int,
    rate: float,
    config: SAETrainConfig,
    processes: Processes,
    workspace: dict[str, Tensor],
) -> tuple[StepOutput, Tensor]:
    """One optimiser step on raw activations.

    Args:
        h: [N, d_in], this process's part of the batch.
        tokens: of the whole batch, over all processes.
        seen: tokens of all batches up to and with this one.
        rate: learning rate.
        workspace: memory used anew at each call, for any layer.

    Returns:
        Losses before the step (this process's summands), and the normalised input they are of.
    """
    coder = one.coder
    x = (h if one.mean is None else h - one.mean) * one.scale
    aux = None
    # nothing can have been silent for longer than training has lasted
    if config.aux_coefficient > 0 and seen > config.dead_tokens:
        dead = (one.silent > config.dead_tokens).nonzero().squeeze(-1)
        k = config.aux_k or 1 << max(0, (coder.d_in // 2).bit_length() - 1)
        aux = AuxK(dead, k, config.aux_coefficient, config.aux_stride)
    products = torch.bfloat16 if config.dtype == "bfloat16" else None
    out, found = gradients(coder, x, one.mse_scale, aux, Share(tokens, processes.total), products, workspace)
    for name, parameter in zip(stored(coder), one.optimizer.param_groups[0]["params"], strict=True):
        parameter.grad = processes.total(getattr(found, name))
    with torch.no_grad():
        if config.unit_norm_decoder:
            found.W_dec.addcmul_(processes.total(found.radial)[:, None], coder.W_dec, value=-1)
        for group in one.optimizer.param_groups:
            group["lr"] = rate
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=True)
        if config.unit_norm_decoder:
            _unit_rows(coder.W_dec)
        fired = torch.zeros(coder.d_sae, dtype=torch.int32, device=h.device)
        fired[out.indices[out.values > 0]] = 1
        one.silent.add_(tokens).masked_fill_(processes.total(fired) > 0, 0)
    return out, x


def figures(
    out: StepOutput, x: Tensor, one: LayerState, tokens: int, rate: float, config: SAETrainConfig, processes: Processes
) -> dict[str, float]:
    """Figures of one batch before its step: fvu pooled over its tokens, l0 their mean; dead after it."""
    mean = processes.total(x.sum(0)) / tokens
    sums = torch.stack(
        [out.loss, out.aux, out.mse, (x - mean).square().sum() / tokens, (out.values > 0).sum() / tokens]
    )
    loss, aux, mse, spread, l0 = processes.total(sums.double()).tolist()
    return {
        "loss": loss,
        "aux": aux,
        "fvu": mse / one.mse_scale / spread if spread > 0 else float("nan"),
        "l0": l0,
        "dead": float((one.silent > config.dead_tokens).double().mean()),
        "lr": rate,
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
