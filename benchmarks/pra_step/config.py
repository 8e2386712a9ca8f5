"""What the benchmark of a step is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from remind.core.errors import ConfigError

Arch = Literal["small", "nano", "qwen3-vl-2b", "qwen3-vl-8b"]
Tune = Literal["full", "lora"]
Variant = Literal["sft", "sequential", "shared", "joint", "base_hidden", "base_topk", "naive"]


@dataclass
class BenchStepConfig:
    """Compare variants of the alignment step with a fine-tuning step on the same x0."""

    arch: Arch = "small"
    """small: Qwen3-VL's shape at width 512, 6 layers and a vocabulary of 8,192, where matrix products already dominate
    on a CPU; nano; or the real sizes. Weights are random."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights; adapters are float32."""
    tokens: int = 1024
    """T: tokens of x0 with its answer."""
    answer: int = 48
    """L: tokens of the answer."""
    markers: float = 0.02
    """Tokens of x1 beyond those of x0 (markers and reminder), as a share of T."""
    summary: float = 0.04
    """Tokens of x2 beyond those of x1, as a share of T."""
    question: float = 0.015
    """Tokens between the summary and the answer, as a share of T."""
    batch: int = 1
    """Samples in the microbatch, all of one length."""
    layers: int | None = None
    """Keep only so many decoder layers; None: all."""
    tune: tuple[Tune, ...] = ("full", "lora")
    """full: all weights of the language model. lora: adapters of rank 64 on it, of rank 8 on small and nano."""
    variants: tuple[Variant, ...] = ("sequential", "shared", "joint", "base_hidden", "base_topk", "naive")
    """Which variants, besides sft."""
    checkpointing: bool = True
    """Compute the activations inside each layer again in the backward pass."""
    rounds: int = 5
    """Rounds that count."""
    memory: bool = True
    """Measure memory as well; on a CPU this takes a process for each variant."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""

    def __post_init__(self) -> None:
        self.tune, self.variants = tuple(self.tune), tuple(self.variants)
        if self.rounds < 1 or self.batch < 1 or self.answer < 1 or self.tokens < 2 * self.answer:
            raise ConfigError("rounds, batch and answer must be 1 or more, and tokens at least twice the answer")
        if min(self.markers, self.summary, self.question) < 0 or self.question > 0.4:
            raise ConfigError("markers, summary and question are shares of 0 or more, question at most 0.4")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device {self.device}: there is no CUDA device here; set device cpu")
