"""The losses: GRPO with MemBuilder's weights (Eq. 11-12) and SaliMory's contrastive terms (Eq. 5-6). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

Weighting = Literal["advantage", "printed"]


def advantages(rewards: Sequence[float], epsilon: float = 1e-4) -> list[float]:
    """Advantages of one group of rollouts: (r − mean) / (σ + ε) (MemBuilder, Eq. 11; σ with Bessel's correction).

    Args:
        rewards: one per rollout, two at least. A NaN is a reward that could not be had: the whole group then has
            advantage 0.

    Returns:
        One per rollout; all 0 where the rewards do not differ.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    if values.isnan().any() or (values == values[0]).all():
        return [0.0] * values.numel()
    return ((values - values.mean()) / (values.std() + epsilon)).tolist()  # type: ignore[no-any-return]


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) from tokens of π_θ, never negative: exp(d) − d − 1, d = log π_ref − log π_θ."""
    difference = ref - logp
    return difference.exp() - difference - 1


def surrogate(ratio: Tensor, advantage: Tensor, weight: Tensor, clip: float, weighting: Weighting) -> Tensor:
    """The clipped surrogate with the weight w of a role (MemBuilder, Eq. 12), elementwise; to be maximised.

    `advantage`: w · min(ρA, clip(ρ) A), what Section 3.4.2 describes and the released code does. `printed`:
    min(w ρA, clip(ρ) A), in which w > 1 amplifies negative advantages alone, and shifts the lower bound of the clip.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
    if weighting == "printed":
        return torch.minimum(weight * ratio * advantage, clipped)
    return weight * torch.minimum(ratio * advantage, clipped)


def grpo_loss(
    logp: Tensor,
    old: Tensor,
    ref: Tensor | None,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip: float = 0.2,
    beta: float = 0.0,
    weighting: Weighting = "advantage",
) -> Tensor:
    """Loss of each trace: mean over its tokens of −surrogate + β k3. Ratios are to π_old, the KL is to π_ref.

    Args:
        logp: [B, T] log-probabilities under the present policy, with gradient.
        old: [B, T] under the policy that sampled.
        ref: [B, T] under the reference; None with β = 0.
        mask: [B, T], 1 at tokens that count; a row without any has loss 0.
        advantage: [B].
        weight: [B], the w of the trace's role.

    Returns:
        [B].
    """
    loss = -surrogate((logp - old).exp(), advantage[:, None], weight[:, None], clip, weighting)
    if ref is not None:
        loss = loss + beta * k3(logp, ref)
    return (loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def mean_logp(logp: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Mean log-probability per token over the traces `rows` ([n] indices): the score s of the contrastive terms. []"""
    chosen = mask[rows]
    return (logp[rows] * chosen).sum() / chosen.sum().clamp(min=1)


def contrastive_loss(winner: Tensor, loser: Tensor, gap: float, scale: float = 0.15) -> Tensor:
    """Δ · softplus(−(s_w − s_l) / η) of one pair (SaliMory, Eq. 5; the form is open in the paper).

    Args:
        winner, loser: [] scores s of the two rollouts (`mean_logp` of the role's traces), with gradient.
        gap: Δ, by which the winner is better.
        scale: η.
    """
    return gap * softplus(-(winner - loser) / scale)
