"""The reranker against automatic differentiation, enumeration, counted draws and damaged files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from remind.core.errors import DataError
from remind.memory.reranker import NAME, Episode, Reranker, RerankerConfig

D = 6


def units(draws: np.random.Generator, *shape: int) -> np.ndarray:
    rows = draws.standard_normal(shape)
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def reranker(config: RerankerConfig, seed: int = 0, size: int = D) -> Reranker:
    """In float64, with random weights."""
    found, draws = Reranker(config, size, np.float64), np.random.default_rng(seed)
    found.w_q[...], found.w_m[...] = draws.normal(0, 0.2, (2, size, size))
    return found


def episode(one: Reranker, draws: np.random.Generator, k: int = 8, name: str = "n") -> Episode:
    query, memories, base = units(draws, D), units(draws, k, D), draws.standard_normal(k)
    order, noise = sample(one, query, memories, name, base), one.noise(name, k)
    assert noise is not None
    rewards = np.r_[1.0, draws.choice([-1.0, 1.0], len(order) - 1)]
    return Episode(query, memories, order, rewards, base, noise)


def sample(one: Reranker, query: np.ndarray, memories: np.ndarray, name: str, base: np.ndarray) -> np.ndarray:
    """The best M by scores and noise, as a bank shows them."""
    noise = one.noise(name, len(memories))
    assert noise is not None
    return np.argsort(-(one.scores(query, memories, base) + noise), kind="stable")[: one.config.top_m]


def objective(config: RerankerConfig, one: Episode, baseline: float, w_q: torch.Tensor, w_m: torch.Tensor) -> Any:
    """Σ_j w_j log P_j, written out draw by draw as in Eq. 1-3; of contrastive learning the mean over what is cited."""
    query, memories = torch.from_numpy(one.query), torch.from_numpy(one.memories)
    learned = (memories + memories @ w_m.T) @ (query + w_q @ query) - memories @ query
    scores = torch.from_numpy(one.base) + config.scale * learned
    total = torch.zeros((), dtype=torch.float64)
    order = [int(position) for position in one.order]
    if config.pretrain:
        shares = scores.log_softmax(0)[order]
        return shares[one.rewards > 0].mean()
    if config.as_printed:
        scores = (scores + torch.as_tensor(one.noise)) / 0.5
    for draw, position in enumerate(order):
        left = [other for other in range(len(scores)) if other not in order[:draw] or config.as_printed]
        total = total + (float(one.rewards[draw]) - baseline) * (scores[position] - torch.logsumexp(scores[left], 0))
    return total


def analytic(one: Reranker, episodes: list[Episode], baseline: float) -> tuple[np.ndarray, np.ndarray]:
    slope = one.contrast if one.config.pretrain else lambda each: one.coefficients(each, baseline)
    a, q, p, v = one.gradient(episodes, [slope(each) for each in episodes])
    return a.T @ q, p.T @ v


@pytest.mark.parametrize("changes", [{}, {"as_printed": True}, {"pretrain": 2}])
def test_the_gradient_is_that_of_automatic_differentiation(changes: dict[str, Any]) -> None:
    config = RerankerConfig(scale=3, top_m=4, top_k=8, **changes)
    # Appendix A.1
    assert (config.scale, config.lr) == ((1, 1e-3) if config.as_printed else (3, 1e-2))
    one, draws = reranker(config), np.random.default_rng(1)
    episodes = [episode(one, draws, name=str(number)) for number in range(3)]
    found = np.stack(analytic(one, episodes, 0.3))

    weights = [torch.from_numpy(w.copy()).requires_grad_() for w in (one.w_q, one.w_m)]

    def mean(w_q: torch.Tensor, w_m: torch.Tensor) -> Any:
        return sum(objective(config, each, 0.3, w_q, w_m) for each in episodes) / len(episodes)

    mean(*weights).backward()
    automatic = np.stack([w.grad.numpy() for w in weights if w.grad is not None])
    assert np.abs(found - automatic).max() <= 1e-10 * np.abs(automatic).max()


def test_samples_follow_plackett_luce() -> None:
    draws = np.random.default_rng(4)
    one = reranker(RerankerConfig(top_k=6, top_m=3, scale=2))
    query, memories = units(draws, D), units(draws, 6, D)
    base = one.config.scale * memories @ query
    scores = one.scores(query, memories, base)
    orders = list(itertools.permutations(range(6), 3))
    number = {order: place for place, order in enumerate(orders)}
    weights, expected = np.exp(scores), np.ones(len(orders))
    for place, order in enumerate(orders):
        for draw, position in enumerate(order):
            expected[place] *= weights[position] / np.delete(weights, order[:draw]).sum()

    own = [number[tuple(sample(one, query, memories, f"name {draw}", base).tolist())] for draw in range(3000)]
    assert chisquare(np.bincount(own, minlength=120), 3000 * expected).pvalue > 1e-3


def test_saved_and_loaded_it_goes_on_alike_and_damage_is_told() -> None:
    draws, config = np.random.default_rng(12), RerankerConfig(lr=0.01, seed=5)
    one = Reranker(config, D)
    episodes = [episode(one, draws, k=20, name=str(number)) for number in range(4)]
    one.learn(episodes)
    whole = one.dump()
    other = Reranker.load(whole, config, D, Path(NAME))
    assert (other.step, other.ema, other.w_q.dtype) == (1, one.ema, np.float32)
    for each in (one, other):
        each.learn(episodes)
    assert one.dump() == other.dump()
    for content in (whole[:200], b"", whole.replace(b"w_q", b"w_x"), b"\xff" * len(whole)):
        with pytest.raises(DataError, match=f"{NAME}: not a reranker that can be read"):
            Reranker.load(content, config, D, Path(NAME))
