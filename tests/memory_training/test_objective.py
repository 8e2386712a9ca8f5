"""The losses against fractions, finite enumeration and the derivatives of Eq. 12 worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import nan

import pytest
import torch

from remind.core.errors import DataError
from remind.memory_training import objective as o


def test_advantages_against_fractions() -> None:
    rewards = [Fraction(n, 10) for n in (0, 3, 3, 8)]
    mean = sum(rewards) / 4
    variance = sum((r - mean) ** 2 for r in rewards) / 3
    expected = [float(r - mean) / (float(variance) ** 0.5 + 1e-4) for r in rewards]
    assert o.advantages([float(r) for r in rewards]) == pytest.approx(expected, abs=1e-12)
    assert o.advantages([float(r) for r in rewards], scale=False) == pytest.approx([float(r - mean) for r in rewards])


def test_groups_without_a_difference_or_a_reward_teach_nothing() -> None:
    # 0.1 + 0.2 apart from 0.3 is a difference; thrice the same number is none, whatever its mean is rounded to
    assert o.advantages([0.1, 0.1, 0.1]) == [0.0] * 3
    assert o.advantages([0.1, nan, 0.9]) == [0.0] * 3
    with pytest.raises(DataError, match="at least 2"):
        o.advantages([1.0])


@pytest.mark.parametrize(
    ("weighting", "ratio", "advantage", "slope"),
    [
        # within the clip: α A, but as printed a positive A is taken from the clipped term, which has no α
        ("advantage", 1.0, 1.0, 4.0),
        ("printed", 1.0, 1.0, 1.0),
        # above the clip
        ("advantage", 1.3, 1.0, 0.0),
        ("advantage", 1.3, -1.0, -4.0),
        ("printed", 1.3, 1.0, 0.0),
        # below it: PPO goes on rewarding, the printed form does not down to (1 - ε) / α = .2
        ("advantage", 0.7, 1.0, 4.0),
        ("advantage", 0.7, -1.0, 0.0),
        ("printed", 0.7, 1.0, 0.0),
        ("printed", 0.21, 1.0, 0.0),
        ("printed", 0.19, 1.0, 4.0),
        ("printed", 0.19, -1.0, 0.0),
    ],
)
def test_slope_of_both_readings_of_eq_12(weighting: o.Weighting, ratio: float, advantage: float, slope: float) -> None:
    rho = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    o.surrogate(rho, torch.tensor(advantage), torch.tensor(4.0), 0.2, weighting).backward()
    assert rho.grad is not None
    assert float(rho.grad) == pytest.approx(slope)


def test_a_weight_of_one_makes_the_readings_equal() -> None:
    ratio, advantage = torch.rand(100) * 2, torch.randn(100)
    both = [o.surrogate(ratio, advantage, torch.ones(100), 0.2, kind) for kind in ("advantage", "printed")]
    assert torch.equal(*both)


def test_gradient_is_that_of_the_expected_reward() -> None:
    """Two roles that share a policy, 3 words, 2 places: all groups of two rollouts, each with its probability."""
    torch.manual_seed(0)
    table = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)  # role, word before (3: none), word
    texts = torch.tensor(list(product(range(3), repeat=2)))

    def logps(role: int) -> torch.Tensor:
        """[9, 2] of every text."""
        steps = table[role].log_softmax(-1)
        return torch.stack([steps[3, texts[:, 0]], steps[texts[:, 0], texts[:, 1]]], 1)

    reward = torch.rand(9, 9, dtype=torch.float64)
    both = [logps(0), logps(1)]
    chance = (both[0].sum(1)[:, None] + both[1].sum(1)[None]).exp()
    (exact,) = torch.autograd.grad((chance * reward).sum(), table)
    rollouts = list(product(range(9), range(9)))
    groups = list(product(rollouts, rollouts))
    weight = (4.0, 1.0)
    now = [logps(0), logps(1)]
    logp, advantage, weights, share = [], [], [], []
    values = reward.tolist()
    with torch.no_grad():
        p = chance.tolist()
    for one, other in groups:
        a = o.advantages([values[one[0]][one[1]], values[other[0]][other[1]]], scale=False)
        for (x, y), own in zip((one, other), a, strict=True):
            for role, text in enumerate((x, y)):
                logp.append((role, text))
                advantage.append(own)
                weights.append(weight[role])
                share.append(p[one[0]][one[1]] * p[other[0]][other[1]])
    index = torch.tensor(logp)
    rows = torch.stack(now)[index[:, 0], index[:, 1]]
    kinds = [torch.tensor(column, dtype=torch.float64) for column in (advantage, weights, share)]
    losses = o.grpo_loss(rows, rows.detach(), None, torch.ones_like(rows), kinds[0], kinds[1])
    (found,) = torch.autograd.grad(-(losses * kinds[2]).sum(), table)
    # two rollouts a group, the mean over 2 tokens, and a baseline that holds the rollout itself: (1 - 1/G)
    scale = torch.tensor(weight, dtype=torch.float64)[:, None, None] * 2 / 2 * (1 - 1 / 2)
    assert torch.allclose(found, scale * exact, atol=1e-12)


def test_loss_averages_over_tokens_and_leaves_padding_out() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    ref = torch.tensor([[0.5, -0.5, 9.0], [9.0, 9.0, 9.0]])
    loss = o.grpo_loss(logp, torch.zeros(2, 3), ref, mask, torch.tensor([2.0, 2.0]), torch.ones(2), beta=0.1)
    k3 = [2.718281828**d - d - 1 for d in (0.5, -0.5)]
    assert loss.tolist() == pytest.approx([-2 + 0.1 * sum(k3) / 2, 0.0])
    loss.sum().backward()
    assert logp.grad is not None
    assert (logp.grad[mask == 0] == 0).all()
    with pytest.raises(DataError, match="reference"):
        o.grpo_loss(logp, logp, None, mask, torch.ones(2), torch.ones(2), beta=0.1)


def test_contrast_moves_the_tokens_of_its_role_alone() -> None:
    torch.manual_seed(1)
    logp = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
    winner, loser = torch.tensor([0, 2]), torch.tensor([3])
    means = [o.mean_logp(logp, mask, rows) for rows in (winner, loser)]
    loss = o.contrastive_loss(*means, gap=0.5, scale=0.15)
    s_w = (logp[0, 0] + logp[0, 1] + logp[2, 0]).item() / 3
    s_l = logp[3].sum().item() / 3
    assert loss.item() == pytest.approx(
        0.5 * float(torch.tensor(-(s_w - s_l) / 0.15, dtype=torch.float64).exp().log1p())
    )
    loss.backward()
    assert logp.grad is not None
    assert (logp.grad[1] == 0).all()
    assert (logp.grad[mask == 0] == 0).all()
    assert (logp.grad[0, :2] < 0).all()
    assert (logp.grad[3] > 0).all()
