"""The optimiser, its parameter groups and the learning rate of each step."""

from __future__ import annotations

from math import ceil, cos, pi
from typing import Any, Literal

import torch
from torch import nn

from remind.alignment.quantised import AdamW8bit

Schedule = Literal["cosine", "constant"]
OptimizerKind = Literal["adamw", "adamw8bit"]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with decay (matrices) and without (norms, biases, embeddings and a head tied to them)."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    # single rows of an embedding, as PEFT keeps them
    embeddings |= {id(p) for name, p in model.named_parameters() if "trainable_tokens" in name}
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (spared if parameter.ndim < 2 or id(parameter) in embeddings else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with betas (0.9, 0.999) and eps 1e-8."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=(0.9, 0.999), eps=1e-8)


def make_optimizer(
    model: nn.Module, kind: OptimizerKind, lr: float, weight_decay: float, seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW as `adamw` has it, or with moments of 8 bits and stochastic rounding of bfloat16 weights (`seed`)."""
    if kind == "adamw":
        return adamw(model, lr, weight_decay)
    return AdamW8bit(parameter_groups(model, weight_decay), lr=lr, betas=(0.9, 0.999), eps=1e-8, seed=seed)


def learning_rate(step: int, total: int, peak: float, warmup: float, schedule: Schedule) -> float:
    """The rate of step `step` (0-based) of `total`: linear rise over the share `warmup`, then cosine to 0 or constant.

    A function of the step alone: there is no scheduler state to save.
    """
    rise = ceil(warmup * total)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule == "constant":
        return peak
    return peak * (1 + cos(pi * (step - rise) / max(total - rise, 1))) / 2
