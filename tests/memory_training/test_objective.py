"""The losses against fractions, finite enumeration and the derivatives of Eq. 12 worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import nan

import pytest
import torch

from remind.memory_training import objective as o


def test_advantages_against_fractions() -> None:
    rewards = [Fraction(n, 10) for n in (0, 3, 3, 8)]
    mean = sum(rewards) / 4
    deviation = float(sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    expected = [float(r - mean) / (deviation + 1e-4) for r in rewards]
    assert o.advantages([float(r) for r in rewards]) == pytest.approx(expected, abs=1e-12)
    # thrice the same number is no difference, whatever its mean is rounded to; nor is a reward that could not be had
    assert o.advantages([0.1, 0.1, 0.1]) == o.advantages([0.1, nan, 0.9]) == [0.0] * 3


@pytest.mark.parametrize(
    ("weighting", "ratio", "slope"),
    [
        # within the clip: α A, but as printed a positive A is taken from the clipped term, which has no α
        ("advantage", 1.0, 4.0),
        ("printed", 1.0, 1.0),
        ("advantage", 1.3, 0.0),
        # below the clip PPO goes on rewarding, the printed form does not down to (1 - ε) / α = .2
        ("advantage", 0.7, 4.0),
        ("printed", 0.21, 0.0),
        ("printed", 0.19, 4.0),
    ],
)
def test_slope_of_both_readings_of_eq_12(weighting: o.Weighting, ratio: float, slope: float) -> None:
    rho = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(o.surrogate(rho, torch.tensor(1.0), torch.tensor(4.0), 0.2, weighting), rho)
    assert float(found) == pytest.approx(slope)


def test_gradient_is_that_of_the_expected_reward() -> None:
    """Two roles that share a policy, 3 words, 2 places: all groups of two rollouts, each with its probability."""
    torch.manual_seed(0)
    table = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)  # role, word before (3: none), word
    texts = torch.tensor(list(product(range(3), repeat=2)))
    steps = table.log_softmax(-1)
    #: [role, text, place]
    logps = torch.stack([torch.stack([one[3, texts[:, 0]], one[texts[:, 0], texts[:, 1]]], 1) for one in steps])
    reward = torch.rand(9, 9, dtype=torch.float64)
    chance = (logps[0].sum(1)[:, None] + logps[1].sum(1)[None]).exp()
    (exact,) = torch.autograd.grad((chance * reward).sum(), table, retain_graph=True)
    rollouts, weight = list(product(range(9), range(9))), (4.0, 1.0)
    values, p = reward.tolist(), chance.tolist()
    traces, numbers = [], []
    for one, other in product(rollouts, rollouts):
        mean = (values[one[0]][one[1]] + values[other[0]][other[1]]) / 2
        share = p[one[0]][one[1]] * p[other[0]][other[1]]
        for rollout in (one, other):
            traces += [(role, text) for role, text in enumerate(rollout)]
            numbers += [(values[rollout[0]][rollout[1]] - mean, weight[role], share) for role in range(2)]
    index, (advantage, weights, share) = torch.tensor(traces), torch.tensor(numbers, dtype=torch.float64).T
    rows = logps[index[:, 0], index[:, 1]]
    losses = o.grpo_loss(rows, rows.detach(), None, torch.ones_like(rows), advantage, weights)
    (found,) = torch.autograd.grad(-(losses * share).sum(), table)
    # two rollouts a group, the mean over 2 tokens, and a baseline that holds the rollout itself: (1 - 1/G)
    scale = torch.tensor(weight, dtype=torch.float64)[:, None, None] * 2 / 2 * (1 - 1 / 2)
    assert torch.allclose(found, scale * exact, atol=1e-12)
