"""Train Top-K SAEs for several layers in one pass over shared batches of activations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sae.errors import ActivationError, ConfigError, LayerError, ShapeError
from sae.step import AuxK, StepOutput, feature_major, step
from sae.topk import TopKSAE

#: Called after each step with (steps done, steps in all, layer to its latest figures).
Progress = Callable[[int, int, Mapping[int, Mapping[str, float]]], None]


@dataclass
class SAETrainConfig:
    """How the coders of all layers are trained."""

    d_sae: int = 4096
    """Number of features of each coder."""
    k: int = 32
    """Features active per token."""
    steps: int = 10_000
    """Optimiser steps; each takes one batch for every layer."""
    tokens: int | None = None
    """Train on this many tokens instead of a number of steps (rounded up to whole batches)."""
    batch_size: int = 2048
    """Tokens per step."""
    lr: float = 5e-5
    """Peak learning rate of AdamW (5e-5 in the paper); small coders trained briefly want about 1e-3."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_share: float = 0.0
    """Share of the steps, at the end, over which it falls linearly to 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = 6.25e-10
    """AdamW's epsilon; small, because gradients of single features are."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    aux_coefficient: float = 1 / 32
    """Weight of the AuxK term, in which dead features reconstruct the error; 0 switches it off."""
    aux_k: int | None = None
    """Dead features per token in that term; None: the power of two next below d_in / 2."""
    dead_tokens: int = 1_000_000
    """A feature is dead after so many tokens without firing."""
    b_dec_init: Literal["mean", "geometric_median", "zero"] = "geometric_median"
    """Start of the decoder bias, from the first tokens."""
    init_tokens: int = 16_384
    """Tokens looked at before the first step for normalisation, bias and loss scale; they are trained on too."""
    unit_norm_decoder: bool = True
    """Keep decoder rows at length 1 (in training units) and remove the gradient along them."""
    normalise: Literal["none", "scale", "centre_scale"] = "scale"
    """Input normalisation while training: times sqrt(d_in) / mean norm, after subtracting the mean with centre_scale.
    It is folded into the saved weights."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and products."""
    seed: int = 0
    """Random start of the coders."""
    log_every: int = 50
    """Steps between lines of metrics."""
    skip_nonfinite: bool = False
    """Leave out batches with values that are not finite instead of stopping."""

    def __post_init__(self) -> None:
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        counts = ("d_sae", "k", "steps", "batch_size", "dead_tokens", "init_tokens", "log_every")
        wrong = [name for name in counts if getattr(self, name) < 1]
        if wrong:
            raise ConfigError(f"{wrong[0]} must be at least 1, not {getattr(self, wrong[0])}")
        if self.k > self.d_sae:
            raise ConfigError(f"k = {self.k} exceeds d_sae = {self.d_sae}")
        if not (self.lr > 0 and 0 <= self.decay_share <= 1 and self.warmup_steps >= 0):
            raise ConfigError("lr must be positive, decay_share between 0 and 1, warmup_steps not negative")

    @property
    def total_steps(self) -> int:
        return self.steps if self.tokens is None else math.ceil(self.tokens / self.batch_size)

    def rate(self, done: int) -> float:
        """Learning rate of the step after `done` steps."""
        total, decay = self.total_steps, round(self.decay_share * self.total_steps)
        rise = min(1.0, (done + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        fall = min(1.0, (total - done) / decay) if decay else 1.0
        return self.lr * min(rise, fall)


@dataclass
class LayerState:
    """All that changes while one layer trains.

    Attributes:
        coder: parameters in training units (inputs are (h - mean) * scale).
        mse_scale: 1 / variance of the normalised inputs.
        silent: [d_sae] int64, tokens since each feature last fired.
    """

    coder: TopKSAE
    optimizer: torch.optim.AdamW
    scale: float
    mean: Tensor | None
    mse_scale: float
    silent: Tensor


@dataclass
class TrainerState:
    """All that changes in training."""

    layers: dict[int, LayerState]
    steps: int = 0
    tokens: int = 0
    skipped: int = 0
    figures: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """Finished coders, which take raw hidden states, and the last figures of each layer."""

    coders: dict[int, TopKSAE]
    steps: int
    tokens: int
    skipped: int
    figures: dict[int, dict[str, float]]


def train(
    batches: Iterable[Mapping[int, Tensor]],
    config: SAETrainConfig,
    *,
    device: torch.device | str = "cpu",
    metrics: str | Path | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train one coder per layer. The seed and the batches fix the result bit for bit on CPU.

    Args:
        batches: layer to activations [N, d_in]; the same layers in each. They may end before all steps are done.
        config: settings shared by the layers.
        device: where the coders are trained.
        metrics: a JSONL file to write: one line per layer every `log_every` steps (loss, aux, fvu, l0, dead, lr).
        progress: called after each step.

    Returns:
        Coders with the normalisation folded in, without gradient.

    Raises:
        ActivationError: values that are not finite (batch and layer are named), or no batch at all.
        ShapeError, LayerError: batches that do not fit together.
    """
    trainer = Trainer(config, device, metrics)
    source = _limited(iter(batches), config.total_steps)
    first: list[tuple[int, dict[int, Tensor]]] = []
    seen = 0
    for number, batch in source:
        if (ready := trainer.accept(number, batch)) is not None:
            first.append((number, ready))
            seen += len(next(iter(ready.values())))
        if seen >= config.init_tokens:
            break
    if not first:
        raise ActivationError("there is not a single batch of activations to train on")
    trainer.start({layer: torch.cat([ready[layer] for _, ready in first]) for layer in first[0][1]})

    def rest() -> Iterator[dict[int, Tensor]]:
        while first:
            yield first.pop(0)[1]
        for number, batch in source:
            if (ready := trainer.accept(number, batch)) is not None:
                yield ready

    for ready in rest():
        figures = trainer.step(ready)
        if progress is not None:
            progress(trainer.state.steps, config.total_steps, figures)
    return trainer.finish()


def _limited(batches: Iterator[Mapping[int, Tensor]], count: int) -> Iterator[tuple[int, Mapping[int, Tensor]]]:
    # zip with the range first: it must not draw a batch more than needed
    return zip(range(count), batches, strict=False)


class Trainer:
    """The loop body of `train`, with all that changes in `state`."""

    def __init__(self, config: SAETrainConfig, device: torch.device | str, metrics: str | Path | None) -> None:
        self.config, self.device = config, torch.device(device)
        self.dtype = getattr(torch, config.dtype)
        self.metrics = None if metrics is None else Path(metrics)
        if self.metrics is not None:
            self.metrics.parent.mkdir(parents=True, exist_ok=True)
            self.metrics.write_text("", encoding="utf-8")
        self.state = TrainerState({})
        self._widths: dict[int, int] = {}

    def accept(self, number: int, batch: Mapping[int, Tensor]) -> dict[int, Tensor] | None:
        """The batch on the device in the training dtype; None where it is to be skipped."""
        widths = self._widths or {layer: h.shape[-1] for layer, h in batch.items()}
        if not batch or set(batch) != set(widths):
            raise LayerError(f"batch {number} holds layers {sorted(batch)}, expected {sorted(widths) or 'some'}")
        self._widths = widths
        ready = {}
        for layer, h in batch.items():
            width = widths[layer]
            if h.ndim != 2 or h.shape[1] != width or len(h) != len(next(iter(batch.values()))) or not len(h):
                raise ShapeError(f"batch {number}, layer {layer}: {list(h.shape)} must be [N, {width}], N >= 1 for all")
            h = h.to(self.device, self.dtype)
            if not bool(torch.isfinite(h).all()):
                if self.config.skip_nonfinite:
                    self.state.skipped += 1
                    return None
                raise ActivationError(f"batch {number}, layer {layer}: activations are not finite (see skip_nonfinite)")
            ready[layer] = h
        return ready

    def start(self, sample: Mapping[int, Tensor]) -> None:
        """Fix normalisation and loss scale and start the coders, from [N, d_in] raw activations per layer."""
        for layer, h in sample.items():
            self.state.layers[layer] = _start(h, self.config, layer)

    def step(self, batch: Mapping[int, Tensor]) -> Mapping[int, Mapping[str, float]]:
        """One optimiser step for every layer on raw activations; returns the latest logged figures."""
        state, config = self.state, self.config
        rate = config.rate(state.steps)
        last = state.steps + 1 == config.total_steps
        log = last or (state.steps + 1) % config.log_every == 0 or state.steps == 0
        state.tokens += len(next(iter(batch.values())))
        for layer, h in batch.items():
            one = state.layers[layer]
            x = (h if one.mean is None else h - one.mean) * one.scale
            out = _layer_step(one, x, config, rate, state.tokens)
            if log:
                state.figures[layer] = _figures(out, x, one, config, rate)
        state.steps += 1
        if log and self.metrics is not None:
            lines = (
                json.dumps({"step": state.steps, "tokens": state.tokens, "layer": layer, **figures})
                for layer, figures in state.figures.items()
            )
            with self.metrics.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
        return state.figures

    def finish(self) -> Trained:
        """Fold the normalisation into the coders."""
        coders = {}
        for layer, one in self.state.layers.items():
            coder = one.coder.finalize(one.scale, one.mean)
            coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().contiguous())
            coders[layer] = coder.requires_grad_(False).eval()
        state = self.state
        return Trained(coders, state.steps, state.tokens, state.skipped, state.figures)


def _start(h: Tensor, config: SAETrainConfig, layer: int) -> LayerState:
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
    fused = h.device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(
        coder.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused,
    )
    silent = torch.zeros(config.d_sae, dtype=torch.int64, device=h.device)
    return LayerState(coder, optimizer, scale, mean, 1 / variance, silent)


def _layer_step(one: LayerState, x: Tensor, config: SAETrainConfig, rate: float, tokens: int) -> StepOutput:
    coder = one.coder
    aux = None
    # nothing can have been silent for longer than training has lasted
    if config.aux_coefficient > 0 and tokens > config.dead_tokens:
        dead = (one.silent > config.dead_tokens).nonzero().squeeze(-1)
        k = config.aux_k or 1 << max(0, (coder.d_in // 2).bit_length() - 1)
        aux = AuxK(dead, k, config.aux_coefficient)
    one.optimizer.zero_grad(set_to_none=True)
    out = step(coder, x, one.mse_scale, aux)
    out.loss.backward()
    with torch.no_grad():
        if config.unit_norm_decoder and coder.W_dec.grad is not None:
            along = (coder.W_dec.grad * coder.W_dec).sum(1, keepdim=True)
            coder.W_dec.grad.addcmul_(along, coder.W_dec, value=-1)
        for group in one.optimizer.param_groups:
            group["lr"] = rate
        one.optimizer.step()
        if config.unit_norm_decoder:
            _unit_rows(coder.W_dec)
        one.silent += len(x)
        one.silent[out.indices[out.values > 0]] = 0
    return out


def _unit_rows(w: Tensor) -> None:
    w.div_(torch.linalg.vector_norm(w, dim=1, keepdim=True))


def _figures(out: StepOutput, x: Tensor, one: LayerState, config: SAETrainConfig, rate: float) -> dict[str, float]:
    """Figures of one batch: fvu pooled over its tokens, before the step."""
    spread = float((x - x.mean(0)).square().sum(1).mean())
    return {
        "loss": float(out.loss.detach()),
        "aux": float(out.aux),
        "fvu": float(out.mse) / one.mse_scale / spread if spread > 0 else float("nan"),
        "l0": float((out.values > 0).sum(1).float().mean()),
        "dead": float((one.silent > config.dead_tokens).float().mean()),
        "lr": rate,
    }


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
