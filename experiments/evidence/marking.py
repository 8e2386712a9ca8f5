"""Which turns a salience marks under a token budget, for all questions of a dialogue and all budgets at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def evidence_ratio(
    salience: Tensor, run: Tensor, cost: Tensor, gold: Sequence[Tensor], budgets: Sequence[int], window: int = 0
) -> np.ndarray:
    """Share of each question's gold turns that `select_blocks` would mark; float64 [Q, budgets].

    Args:
        salience: [n, Q]; -inf is never chosen.
        run: int64 [n, Q] or [n, 1]; -1: not at hand, so never marked.
        cost: int64 [n], tokens.
        gold: for each question positions of its gold turns.
        budgets: in tokens.
        window: turns on either side of a chosen one that are marked with it, in the same run.
    """
    n, questions = salience.shape
    scores = salience.float().numpy()
    runs = np.broadcast_to(run.numpy(), scores.shape)
    tokens = cost.double().numpy()
    scores = np.where(runs < 0, np.float32(-np.inf), scores)
    order = np.argsort(-scores, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(n)[:, None], order.shape), axis=0)
    # a turn is marked with the first chosen turn whose window holds it; n: with none
    seed = np.where(scores == -np.inf, n, rank)
    covered = seed.copy()
    for step in range(1, min(window, n - 1) + 1):
        joined = (runs[step:] == runs[:-step]) & (runs[step:] >= 0)
        covered[step:] = np.where(joined, np.minimum(covered[step:], seed[:-step]), covered[step:])
        covered[:-step] = np.where(joined, np.minimum(covered[:-step], seed[step:]), covered[:-step])
    found = np.zeros((questions, len(budgets)))
    for q in range(questions):
        spent = np.bincount(covered[:, q], weights=tokens, minlength=n + 1)[:n].cumsum()
        last = np.searchsorted(spent, np.asarray(budgets, dtype=np.float64), side="right")
        places = covered[gold[q].numpy(), q]
        found[q] = ((places[:, None] < last[None]) & (places[:, None] < n)).mean(0)
    return found
