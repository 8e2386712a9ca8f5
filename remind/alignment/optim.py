"""The optimiser, its parameter groups and the learning rate of each step."""

from __future__ import annotations

from math import ceil, cos, pi
from typing import Any

import torch
from torch import nn

from remind.alignment.adamw8bit import AdamW8bit
from remind.alignment.config import OptimizerKind, Schedule


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with decay (matrices) and without (norms, biases, embeddings and a head tied to them)."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    # single rows of an embedding, as PEFT keeps them
    embeddings |= {id(p) for name, p in model.named_parameters() if "trainable_tokens" in name}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or id(parameter) in embeddings else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, kind: OptimizerKind, lr: float, weight_decay: float, seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW with betas (0.9, 0.999) and eps 1e-8: torch's, or with moments of 8 bits.

    Args:
        seed: of the stochastic rounding (adamw8bit).
    """
    groups = parameter_groups(model, weight_decay)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)
    return AdamW8bit(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, seed=seed)


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
