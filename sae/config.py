"""Settings of SAE training; importing this needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from sae.errors import ConfigError
from sae.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    Share,
    ShareBelowOne,
    check_ranges,
)

#: Rows of a matrix that is held as a whole.
Size = Annotated[int, Range(ge=1, le=2**24)]


@dataclass
class SAETrainConfig:
    """Settings of training, shared by the coders of all layers."""

    d_sae: Size = 4096
    """Number of features of each coder."""
    k: PositiveInt = 32
    """Features active per token."""
    steps: PositiveInt = 10_000
    """Optimiser steps; each takes one batch for every layer."""
    tokens: PositiveInt | None = None
    """Train on this many tokens instead of a number of steps (rounded up to whole batches)."""
    batch_size: Size = 2048
    """Tokens per step, over all processes."""
    lr: PositiveFloat = 5e-5
    """Peak learning rate of AdamW. 5e-5 is the paper's (Appendix E.2), for states 4,096 wide; for small models and a
    few thousand steps the shipped configs take 1e-3 and more."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_share: Share = 0.0
    """Share of the steps, at the end, over which it falls linearly to 0."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: PositiveFloat = 6.25e-10
    """AdamW's epsilon; small, because gradients of single features are."""
    aux_coefficient: NonNegativeFloat = 1 / 32
    """Weight of the auxiliary loss (AuxK), in which dead features reconstruct the error; 0: off."""
    dead_tokens: PositiveInt = 1_000_000
    """A feature is dead after so many tokens without firing."""
    b_dec_init: Literal["mean", "geometric_median", "zero"] = "geometric_median"
    """Start of the decoder bias, from the first tokens."""
    init_tokens: PositiveInt = 16_384
    """Tokens that fix normalisation, bias and loss scale before the first step; they are trained on too."""
    normalise: Literal["none", "scale", "centre_scale"] = "scale"
    """Input normalisation, folded on save: times sqrt(d_in) / mean norm, with centre_scale after centring."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision. bfloat16 is that of the encoder product alone, which decides what is active; the rest is float32."""
    seed: Seed = 0
    """Random start of the coders."""
    log_every: PositiveInt = 50
    """Steps between lines of metrics."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        if self.k > self.d_sae:
            raise ConfigError(f"k = {self.k} exceeds d_sae = {self.d_sae}")

    @property
    def total_steps(self) -> int:
        return self.steps if self.tokens is None else math.ceil(self.tokens / self.batch_size)

    def rate(self, done: int) -> float:
        """Learning rate of the step after `done` steps."""
        total, decay = self.total_steps, round(self.decay_share * self.total_steps)
        rise = min(1.0, (done + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        fall = min(1.0, (total - done) / decay) if decay else 1.0
        return self.lr * min(rise, fall)
