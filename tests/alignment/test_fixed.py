"""Teachers that are not the live model, against the formula written out on whole logits in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import Edge, Objective
from remind.alignment.objective import (
    FixedTeacher,
    Head,
    HiddenTeacher,
    Target,
    TopKTeacher,
    chunked_terms,
    position_terms,
)
from remind.alignment.teachers import topk_targets
from remind.core.errors import ConfigError, DataError

N, D, V, TAU = 7, 6, 23, 2.0


def objective_of(alpha: float, chunk: int = 3, **more: Any) -> Objective:
    return Objective(
        edges=(Edge(0, 1, 3.0, alpha), Edge(0, 2, 1.5, alpha)), teacher_model_kind="base", chunk=chunk, **more
    )


def numbers(seed: int = 0) -> tuple[Tensor, Head, dict[int, Tensor], Head, Tensor, Tensor]:
    """Student hidden states, its head, teachers' hidden states and head, targets, weights of positions."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    student, own = normal(N, D).requires_grad_(), Head(normal(V, D).requires_grad_())
    teachers, head = {1: normal(N, D), 2: normal(N, D)}, Head(normal(V, D), normal(V), 1.4, 5.0)
    targets = torch.randint(0, V, (N,), generator=g)
    return student, own, teachers, head, targets, torch.rand(N, generator=g, dtype=torch.float64)


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    if head.bias is None:
        return hidden @ head.weight.T
    return 5.0 * torch.tanh(1.4 * (hidden @ head.weight.T + head.bias) / 5.0)


def softmax(z: Tensor, tau: float = TAU) -> Tensor:
    e = torch.exp((z - z.max(-1, keepdim=True).values.detach()) / tau)
    return e / e.sum(-1, keepdim=True)


def bucket(p: Tensor, indices: Tensor) -> Tensor:
    """Probabilities of `indices` and of all other tokens, by summing those."""
    others = torch.ones_like(p).scatter(-1, indices, 0.0)
    return torch.cat([p.gather(-1, indices), (p * others).sum(-1, keepdim=True)], -1)


def plain(
    z: Tensor, teachers: dict[int, Tensor], targets: Tensor, w: Tensor, objective: Objective, k: int | None
) -> Tensor:
    """Eq. 6-7 with edges into 0, of logits, and every tensor whole."""
    total = -objective.lambda_hard * softmax(z, 1.0)[torch.arange(N), targets].log()
    for edge in objective.edges:
        z_teacher = teachers[edge.teacher]
        p, q = softmax(z_teacher), softmax(z)
        if k is not None:
            indices = z_teacher.topk(k).indices
            p, q = bucket(p, indices), bucket(q, indices)
        forward, reverse = (p * (p.log() - q.log())).sum(-1), (q * (q.log() - p.log())).sum(-1)
        total = total + (1 - objective.lambda_hard) * TAU**2 * edge.gamma * (
            edge.alpha * forward + (1 - edge.alpha) * reverse
        )
    return (total * w).sum()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_values_and_gradients_are_those_of_the_formula(alpha: float, k: int | None) -> None:
    student, own, hidden, head, targets, w = numbers()
    taught = {level: logits_of(h, head) for level, h in hidden.items()}
    expected = plain(logits_of(student, own), taught, targets, w, objective_of(alpha), k)
    theirs = torch.autograd.grad(expected * 0.7, (student, own.weight))
    for chunk in (1, 3, 100):
        fixed: dict[int, FixedTeacher] = {level: HiddenTeacher(h, head) for level, h in hidden.items()}
        if k is not None:
            fixed = {level: TopKTeacher(*topk_targets(h, head, TAU, k, chunk)) for level, h in hidden.items()}
        found, values = chunked_terms({0: student}, own, targets, w, objective_of(alpha, chunk), (0,), fixed)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert set(values) >= {"hard0", "ce0", "entropy0", "dist01", "dist02", "jsd01", "jsd02"}
        ours = torch.autograd.grad(found * 0.7, (student, own.weight))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_top_k_targets_are_probabilities_in_order_and_keep_a_small_rest() -> None:
    _, _, hidden, head, _, _ = numbers(3)
    indices, log_probs = topk_targets(hidden[1], head, TAU, 4, chunk=2)
    assert (indices.dtype, indices.shape, log_probs.shape) == (torch.int32, (N, 4), (N, 5))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    assert (log_probs[:, :4].diff() <= 0).all()
    assert torch.equal(indices[:, 0].long(), logits_of(hidden[1], head).argmax(-1))
    # a rest of 1e-13, which 1 - sum in float32 would make 0 or 1e-7
    weight = torch.tensor([[60.0, 0, 0], [0, 0, 0], [-1, 0, 0]])
    low = topk_targets(torch.eye(3)[:1], Head(weight), 2.0, 1)[1]
    expected = math.log(math.exp(-30) + math.exp(-30.5))
    assert float(low[0, 1]) == pytest.approx(expected, rel=1e-5)


def test_fixed_teachers_get_no_gradient_and_are_watched() -> None:
    student, own, hidden, head, targets, w = numbers(4)
    hidden[1].requires_grad_()
    head.weight.requires_grad_()
    logits = logits_of(hidden[1], head)
    loss, values = chunked_terms(
        {0: student}, own, targets, w, objective_of(0.5), (0,), {1: HiddenTeacher(hidden[1], head)}
    )
    loss.backward()
    target = {1: Target(torch.log_softmax(logits / TAU, -1))}
    position_terms({0: logits_of(student, own)}, targets, objective_of(0.5), (0,), fixed=target)[0].sum().backward()
    assert hidden[1].grad is None
    assert head.weight.grad is None
    p = softmax(logits, 1.0)
    torch.testing.assert_close(values["teacher_ce1"], -p[torch.arange(N), targets].log())
    torch.testing.assert_close(values["teacher_entropy1"], -(p * p.log()).sum(-1))


def test_teachers_that_do_not_fit_are_refused() -> None:
    student, own, hidden, head, targets, w = numbers(5)

    def terms(teacher: FixedTeacher) -> None:
        chunked_terms({0: student}, own, targets, w, objective_of(0.5), (0,), {1: teacher})

    with pytest.raises(DataError, match="3 positions, the batch 7"):
        terms(HiddenTeacher(hidden[1][:3], head))
    with pytest.raises(ConfigError, match="head is trained"):
        terms(HiddenTeacher(hidden[1]))
    own.weight.requires_grad_(False)
    terms(HiddenTeacher(hidden[1]))
    with pytest.raises(DataError, match="top-2"):
        TopKTeacher(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="23 tokens"):
        topk_targets(hidden[1], head, TAU, 24)
