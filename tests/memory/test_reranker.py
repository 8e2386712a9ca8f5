"""The reranker against automatic differentiation, enumeration, counted draws and damaged files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from remind.core.errors import ConfigError, DataError
from remind.memory.reranker import (
    AS_PRINTED,
    NAME,
    Choice,
    Episode,
    Reranker,
    RerankerConfig,
)

D = 6
MODES = list(itertools.product(("pl", "paper"), ("item", "togo", "set"), (False, True)))


def units(draws: np.random.Generator, *shape: int) -> np.ndarray:
    rows = draws.standard_normal(shape)
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def reranker(config: RerankerConfig, seed: int = 0, size: int = D) -> Reranker:
    """In float64, with random weights."""
    found, draws = Reranker(config, size, np.float64), np.random.default_rng(seed)
    found.w_q[...], found.w_m[...] = draws.normal(0, 0.2, (2, size, size))
    return found


def episode(one: Reranker, draws: np.random.Generator, k: int = 8, based: bool = False, name: str = "n") -> Episode:
    query, memories = units(draws, D), units(draws, k, D)
    base = draws.standard_normal(k) if based else None
    choice = one.sample(query, memories, name, base)
    return Episode(query, memories, choice, draws.choice([-1.0, 1.0], len(choice.order)), base)


def objective(config: RerankerConfig, one: Episode, baseline: float, w_q: torch.Tensor, w_m: torch.Tensor) -> Any:
    """Σ_j w_j log P_j, written out draw by draw as in Eq. 1-3."""
    query, memories = torch.from_numpy(one.query), torch.from_numpy(one.memories)
    scores = config.scale * (memories + memories @ w_m.T) @ (query + w_q @ query)
    if one.base is not None:
        scores = torch.from_numpy(one.base) + scores - config.scale * memories @ query
    total = torch.zeros((), dtype=torch.float64)
    order = [int(position) for position in one.choice.order]
    gains = [float(reward) - baseline for reward in one.rewards]
    for draw, position in enumerate(order):
        if config.policy == "paper":
            assert one.choice.noise is not None
            log_p = torch.log_softmax((scores + torch.from_numpy(one.choice.noise)) / config.tau, 0)[position]
        else:
            left = [other for other in range(len(scores)) if other not in order[:draw]]
            log_p = scores[position] - torch.logsumexp(scores[left], 0)
        weight = {"item": gains[draw], "togo": sum(gains[draw:]), "set": sum(gains) / len(gains)}[config.credit]
        total = total + weight * log_p
    return total


def analytic(one: Reranker, episodes: list[Episode], baseline: float) -> tuple[np.ndarray, np.ndarray]:
    a, q, p, v = one.gradient(episodes, [one.coefficients(each, baseline) for each in episodes])
    return a.T @ q, p.T @ v


@pytest.mark.parametrize(("policy", "credit", "based"), MODES)
def test_the_gradient_is_that_of_automatic_and_of_numerical_differentiation(
    policy: Any, credit: Any, based: bool
) -> None:
    config = RerankerConfig(policy=policy, credit=credit, scale=3, tau=0.7, top_m=4, top_k=8)
    one, draws = reranker(config), np.random.default_rng(1)
    episodes = [episode(one, draws, based=based, name=str(number)) for number in range(3)]
    found = np.stack(analytic(one, episodes, 0.3))

    weights = [torch.from_numpy(w.copy()).requires_grad_() for w in (one.w_q, one.w_m)]

    def mean(w_q: torch.Tensor, w_m: torch.Tensor) -> Any:
        return sum(objective(config, each, 0.3, w_q, w_m) for each in episodes) / len(episodes)

    mean(*weights).backward()
    automatic = np.stack([w.grad.numpy() for w in weights if w.grad is not None])
    scale = np.abs(automatic).max()
    assert np.abs(found - automatic).max() <= 1e-10 * scale

    flat = torch.stack([w.detach() for w in weights])
    for place in [(0, 0, 0), (0, 2, 5), (0, 5, 1), (1, 0, 0), (1, 3, 4), (1, 5, 2)]:
        step = torch.zeros_like(flat)
        step[place] = 1e-5
        numerical = (mean(*(flat + step)) - mean(*(flat - step))) / 2e-5
        assert abs(found[place] - float(numerical)) <= 1e-6 * scale


def test_a_step_adds_lr_times_the_mean_gradient_and_then_moves_the_baseline() -> None:
    config = RerankerConfig(scale=3, lr=0.1, top_m=3, top_k=8, ema=0.9)
    one, draws = reranker(config), np.random.default_rng(2)
    one.ema = -0.5
    episodes = [episode(one, draws, name=str(number)) for number in range(4)]
    expected = [w + 0.1 * g for w, g in zip((one.w_q, one.w_m), analytic(one, episodes, -0.5), strict=True)]
    assert one.learn(episodes)
    np.testing.assert_allclose([one.w_q, one.w_m], expected, rtol=1e-12, atol=1e-14)
    assert one.ema == pytest.approx(0.9 * -0.5 + 0.1 * np.mean([each.rewards for each in episodes]))
    assert one.step == 1


#: A task of five candidates of which two are shown; the rewards are of the memories themselves.
_WORTH = np.array([1.0, -1.0, -1.0, 1.0, -1.0])


def _task(credit: Any) -> tuple[Reranker, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(3)
    return reranker(RerankerConfig(credit=credit, scale=2, top_k=5, top_m=2)), units(draws, D), units(draws, 5, D)


def _probability(scores: np.ndarray, order: tuple[int, ...]) -> float:
    """Plackett-Luce by multiplication."""
    weights, left, found = np.exp(scores), list(range(len(scores))), 1.0
    for position in order:
        found *= weights[position] / weights[left].sum()
        left.remove(position)
    return found


def _expected_step(one: Reranker, query: np.ndarray, memories: np.ndarray, baseline: float) -> np.ndarray:
    scores, total = one.scores(query, memories), np.zeros((2, D, D))
    for order in itertools.permutations(range(5), 2):
        choice = Choice(np.array(order), np.zeros(5))
        each = Episode(query, memories, choice, _WORTH[list(order)])
        total += _probability(scores, order) * np.stack(analytic(one, [each], baseline))
    return total


def _expected_reward(one: Reranker, query: np.ndarray, memories: np.ndarray, of: Callable[[np.ndarray], float]) -> Any:
    """Gradient of E[of(rewards)] by central differences over all weights."""
    found = np.zeros((2, D, D))
    for which, weights in enumerate((one.w_q, one.w_m)):
        for place in np.ndindex(D, D):
            means = []
            for step in (1e-5, -1e-5):
                weights[place] += step
                scores = one.scores(query, memories)
                orders = itertools.permutations(range(5), 2)
                means.append(sum(_probability(scores, order) * of(_WORTH[list(order)]) for order in orders))
                weights[place] -= step
            found[(which, *place)] = (means[0] - means[1]) / 2e-5
    return found


@pytest.mark.parametrize("baseline", [-1.0, 0.0, 0.5])
def test_expected_steps_climb_the_expected_reward_except_with_credit_by_item(baseline: float) -> None:
    one, query, memories = _task("set")
    of_mean = _expected_reward(one, query, memories, lambda found: float(found.mean()))
    np.testing.assert_allclose(_expected_step(one, query, memories, baseline), of_mean, atol=1e-8)

    one, query, memories = _task("togo")
    of_sum = 2 * of_mean
    np.testing.assert_allclose(_expected_step(one, query, memories, baseline), of_sum, atol=1e-8)

    one, query, memories = _task("item")
    biased = _expected_step(one, query, memories, baseline)
    # what is left out: how the first draw changes the reward of the second; with it the sum is complete
    weights, scores = np.exp(one.scores(query, memories)), one.scores(query, memories)
    left_out = np.zeros(5)
    for first, second in itertools.permutations(range(5), 2):
        gain = _WORTH[second] - baseline
        slope = -weights / weights.sum()
        slope[first] += 1
        left_out += _probability(scores, (first, second)) * gain * slope
    query_, adapted = query + one.w_q @ query, memories + memories @ one.w_m.T
    missing = 2 * np.stack([np.outer(left_out @ adapted, query), np.outer(query_, left_out @ memories)])
    np.testing.assert_allclose(biased + missing, of_sum, atol=1e-8)
    assert np.abs(biased - of_sum).max() > 1e-2 * np.abs(of_sum).max()


def test_samples_follow_plackett_luce() -> None:
    draws = np.random.default_rng(4)
    one = reranker(RerankerConfig(top_k=6, top_m=3, scale=2))
    query, memories = units(draws, D), units(draws, 6, D)
    scores = one.scores(query, memories)
    orders = list(itertools.permutations(range(6), 3))
    number = {order: place for place, order in enumerate(orders)}
    expected = np.array([_probability(scores, order) for order in orders])

    own = [number[tuple(one.sample(query, memories, f"name {draw}").order.tolist())] for draw in range(3000)]
    assert chisquare(np.bincount(own, minlength=120), 3000 * expected).pvalue > 1e-3


def test_temperature_changes_no_order_but_the_gradient_as_printed() -> None:
    draws = np.random.default_rng(5)
    query, memories = units(draws, D), units(draws, 8, D)
    found = []
    for tau in (0.1, 0.5, 2.0):
        one = reranker(replace(AS_PRINTED, tau=tau, top_k=8))
        each = Episode(query, memories, one.sample(query, memories, "q1"), np.ones(5))
        found.append((each.choice.order.tolist(), one.coefficients(each, 0.5)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert not np.allclose(found[0][1], found[2][1])


def test_only_the_share_that_explores_is_sampled_and_learned_from() -> None:
    draws = np.random.default_rng(8)
    one = reranker(RerankerConfig(explore=0.3))
    query, memories = units(draws, D), units(draws, 20, D)
    choices = [one.sample(query, memories, str(name)) for name in range(1000)]
    plain = [choice for choice in choices if choice.noise is None]
    assert 630 < len(plain) < 770
    assert all(choice.order.tolist() == one.best(query, memories).order.tolist() for choice in plain)
    before = one.w_q.copy()
    assert not one.learn([Episode(query, memories, plain[0], np.ones(5))])
    np.testing.assert_array_equal(one.w_q, before)
    assert (one.step, one.ema) == (0, None)


def test_contrastive_training_raises_the_positives() -> None:
    draws = np.random.default_rng(11)
    one = Reranker(RerankerConfig(), 16)
    turned = np.linalg.qr(draws.standard_normal((16, 16)))[0]
    episodes = []
    for _ in range(64):
        query, memories = units(draws, 16), units(draws, 20, 16)
        memories[7] = turned @ query
        episodes.append(Episode(query, memories, Choice(np.array([7, 3])), np.array([1.0, -1.0])))
    before = np.mean([one.best(each.query, each.memories).order[0] == 7 for each in episodes])
    one.pretrain([*episodes, replace(episodes[0], rewards=-np.ones(2))], lr=0.05)
    after = np.mean([one.best(each.query, each.memories).order[0] == 7 for each in episodes])
    assert before < 0.3
    assert after > 0.8


def test_saved_and_loaded_it_goes_on_alike(tmp_path: Path) -> None:
    draws = np.random.default_rng(12)
    one = Reranker(RerankerConfig(lr=0.01, seed=5), D)
    episodes = [episode(one, draws, k=20, name=str(number)) for number in range(4)]
    one.learn(episodes)
    assert one.save(tmp_path) == tmp_path / NAME
    other = Reranker.load(tmp_path)
    assert (other.config, other.step, other.ema, other.w_q.dtype) == (one.config, 1, one.ema, np.float32)
    for each in (one, other):
        each.learn(episodes)
    np.testing.assert_array_equal(one.w_q, other.w_q)
    np.testing.assert_array_equal(one.w_m, other.w_m)
    assert one.ema == other.ema


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    Reranker(RerankerConfig(), D).save(tmp_path)
    whole = (tmp_path / NAME).read_bytes()
    for content in (whole[:200], b"", whole.replace(b"w_q", b"w_x"), b"\xff" * len(whole)):
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(DataError, match=f"{NAME}: not a reranker that can be read"):
            Reranker.load(tmp_path)
    with pytest.raises(DataError, match=NAME):
        Reranker.load(tmp_path / "absent")


def test_weights_that_are_not_finite_are_not_loaded(tmp_path: Path) -> None:
    one = Reranker(RerankerConfig(), D)
    one.w_m[2, 3] = np.nan
    one.save(tmp_path)
    with pytest.raises(DataError, match="finite square matrices"):
        Reranker.load(tmp_path)


def _spoiled(rows: np.ndarray, place: Any, value: float) -> np.ndarray:
    found = rows.copy()
    found[place] = value
    return found


def test_vectors_that_cannot_be_ranked_are_one_line_errors() -> None:
    draws = np.random.default_rng(14)
    one, query, memories = reranker(RerankerConfig()), units(draws, D), units(draws, 4, D)
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((_spoiled(query, 2, np.nan), memories), r"^\[query\]: its vector has NaN"),
        ((np.zeros(D), memories), r"^\[query\]: .*is zero"),
        ((query, _spoiled(memories, (2, 1), np.inf)), r"^\[memory 2\]: its vector has NaN or infinity"),
        ((query, _spoiled(memories, 3, 0.0)), r"^\[memory 3\]: .*is zero"),
        ((query, units(draws, 4, D + 1)), "another encoder"),
        ((units(draws, D - 1), memories), "another encoder"),
        ((query, memories[0]), "another encoder"),
        ((query, memories[:0]), "no candidates"),
        ((query, memories, np.zeros(3)), "base logits must be 4 finite numbers"),
        ((query, memories, _spoiled(np.zeros(4), 0, np.nan)), "base logits must be 4 finite numbers"),
    ]
    for arguments, message in bad:
        with pytest.raises(DataError, match=message) as error:
            one.scores(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_m": 21}, "top_m must be at most top_k"),
        ({"lr": float("nan")}, "RerankerConfig.lr"),
        ({"policy": "greedy"}, "RerankerConfig.policy must be one of pl, paper"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RerankerConfig(**settings)
