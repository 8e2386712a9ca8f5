"""The trainer against log-probabilities and losses worked out trace by trace; the losses against fractions, finite
enumeration and the derivatives of Eq. 12 worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from remind.core.errors import ConfigError, DataError
from remind.memory_training import trainer as o
from remind.memory_training.config import PolicyGradientConfig, SaliMoryConfig, TrainMemoryConfig
from remind.memory_training.episodes import Pair, Prompt, Scores
from remind.memory_training.trainer import EpisodeTrainer, arguments
from remind.models.backbone import Backbone

END = 1


class TwoRoles:
    """A booster completes a prompt, and `second` one for each token 2 of that, two at most. Two boosters are compared.

    The prompts are long, and shared by the rollouts of a group.
    """

    def __len__(self) -> int:
        return 40

    def episode(self, row: int) -> Any:
        (reply,) = yield [Prompt("booster", [3 + row % 4, 4] * 10)]
        count = min(reply.count(2), 2)
        replies = (yield [Prompt("second", [5, 6] * 10)] * count) if count else []
        return [reply, *replies]

    def score(self, row: int, outcomes: Sequence[list[list[int]]]) -> Any:
        worth = [float(sum(text.count(2) for text in outcome)) for outcome in outcomes]
        pairs = (Pair("booster", 0, 3, 0.5),)
        return Scores({"booster": worth, "second": worth}, {"booster": [4.0] * len(worth)}, pairs)


def make(policy: Backbone, out: Path, rl: Any = None, **changes: Any) -> EpisodeTrainer:
    """Two passes of one group of four rollouts each."""
    settings = PolicyGradientConfig(**{"group": 4, "reply_tokens": 4, "beta": 0.02, "temperature": 0.7} | (rl or {}))
    given: dict[str, Any] = {"rl": settings, "steps": 2, "batch_size": 2, "lr": 1e-2, "warmup": 0.0}
    cfg = TrainMemoryConfig(str(out), "adrpo", **given | changes)
    trainer = EpisodeTrainer(policy, TwoRoles(), cfg, arguments(cfg))
    trainer._wrapped = trainer._module(trainer.model)  # as for training
    return trainer


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradient_are_those_of_single_traces(
    attention: str, policy: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share their prompts, and rows as they are, against the loss by its definition in plain forwards."""
    policy.model.set_attn_implementation(attention)
    seen: list[Any] = []
    trainer = make(policy, tmp_path, salimory=SaliMoryConfig(boost=0.3))
    monkeypatch.setattr(trainer, "_note", lambda scores, traces: seen.extend(zip(scores, traces, strict=True)))
    chunks = trainer.chunks([[0], [1]])
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.5)  # away from the reference
    assert [chunk.packed.visible is None for chunk in chunks] == [attention == "eager"] * 2
    found = sum((trainer.loss(trainer._wrapped, chunk) for chunk in chunks), torch.zeros(()))

    def logp(model: Any, trace: tuple[Prompt, list[int]]) -> torch.Tensor:
        prompt, reply = trace
        ids = torch.tensor([[*prompt.ids, *reply]])
        steps = (model(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        return steps[range(len(prompt.ids) - 1, ids.shape[1] - 1), reply]

    expected, total = torch.zeros(()), sum(len(own) for _, group in seen for own in group)
    for score, group in seen:
        rewards = torch.tensor(score.rewards["booster"])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for advantage, own in zip(advantages.nan_to_num() if rewards.std() else rewards * 0, group, strict=True):
            for trace in own:
                weight = 4.0 if trace[0].role == "booster" else 1.0
                now = logp(trainer.model, trace)
                difference = logp(trainer.reference.model, trace).detach() - now  # type: ignore[union-attr]
                ratio = (now - now.detach()).exp()
                loss = -weight * ratio * advantage + 0.02 * (difference.exp() - difference - 1)
                expected = expected + loss.mean() / total
        winner, loser = (logp(trainer.model, group[n][0]).mean() for n in (0, 3))
        expected = expected + 0.3 * 0.5 * torch.log1p(torch.exp(-(winner - loser) / 0.15)) / 2
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    both = (torch.autograd.grad(loss, list(trainer.model.parameters())) for loss in (found, expected))
    for one, other in zip(*both, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_vllm_answers_in_place_of_the_model(policy: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the interface that TRL has for it gets each round's prompts, and new weights every step."""
    theirs = pytest.importorskip("trl.generation.vllm_generation", reason="needs the extra rl")
    made = create_autospec(theirs.VLLMGeneration)
    made.return_value.generate.side_effect = lambda prompts, *rest: (None, [[2, END] for _ in prompts], None, None)
    monkeypatch.setattr(theirs, "VLLMGeneration", made)
    trainer = make(policy, tmp_path, rl={"vllm": "server"})
    for trainer.state.global_step, rows in enumerate(([[0], [1]], [[2], [3]])):
        trainer.chunks(rows)
    assert (made.call_args.kwargs["mode"], made.return_value.sync_weights.call_count) == ("server", 2)
    assert [len(call.args[0]) for call in made.return_value.generate.call_args_list] == [8] * 4


def test_updates_of_a_generation_end_where_the_policy_has_moved_too_far(policy: Backbone, tmp_path: Path) -> None:
    """The first inner step has divergence 0 and is taken; all others are not, and the next generation begins anew."""
    weights, first = {}, {name: value.clone() for name, value in policy.model.state_dict().items()}
    for name, updates, limit in (("one", 1, None), ("stopped", 3, 0.0), ("free", 3, None)):
        policy.model.load_state_dict(first)
        make(policy, tmp_path / name, rl={"inner_epochs": updates, "kl_stop": limit}, steps=1).train()
        weights[name] = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert torch.allclose(weights["stopped"], weights["one"], atol=1e-6)
    assert not torch.allclose(weights["free"], weights["one"], atol=1e-4)


def test_what_cannot_be_trained(policy: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="batch_size 3 is not a multiple of 1 x 2 processes"):
        make(policy, tmp_path, batch_size=3)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(TwoRoles, "__len__", lambda self: 0)
    with pytest.raises(DataError, match="nothing to train on"):
        make(policy, tmp_path)


# losses


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
