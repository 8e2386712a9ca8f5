"""Fitting the fused weights: conditional logistic regression over the turns of each question's dialogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fit_weights(
    designs: Sequence[Tensor],
    gold: Sequence[Sequence[Tensor]],
    share: Sequence[float],
    ridge: float = 1e-3,
    columns: Sequence[int] | None = None,
) -> Tensor:
    """Weights w that make the gold turns likely: each question draws one of its turns with softmax(X w), a gold one.

    Minimises Σ share · mean over gold turns of −log p(turn), plus ridge · |w|², by L-BFGS from 0. It is convex.

    Args:
        designs: for each dialogue X [n, Q, d].
        gold: for each dialogue and question positions of the gold turns.
        share: for each dialogue the weight of one of its questions.
        columns: which of the d columns have a weight; the others get 0. None: all.

    Returns:
        float32 [d].
    """
    d = designs[0].shape[-1]
    kept = list(range(d)) if columns is None else list(columns)
    xs = [x if columns is None else x[..., kept] for x in designs]
    targets = []
    for x, found in zip(xs, gold, strict=True):
        target = torch.zeros(x.shape[:2])
        for q, turns in enumerate(found):
            target[turns, q] = 1 / len(turns)
        targets.append(target)
    w = torch.zeros(len(kept), requires_grad=True)
    optimiser = torch.optim.LBFGS([w], max_iter=100, tolerance_change=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = ridge * w.square().sum()
        for x, target, weight in zip(xs, targets, share, strict=True):
            logit = x @ w
            total = total + weight * (logit.logsumexp(0) - (target * logit).sum(0)).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    full = torch.zeros(d)
    full[kept] = w.detach()
    return full


def question_shares(datasets: Sequence[str], sizes: Sequence[int]) -> list[float]:
    """Weight of one question of each dialogue, so that every dataset weighs the same and the weights add up to 1."""
    totals = {name: sum(n for other, n in zip(datasets, sizes, strict=True) if other == name) for name in datasets}
    return [1 / (len(totals) * totals[name]) for name in datasets]
