"""The chunked objective against the dense one on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remind.alignment.config import Edge, Objective
from remind.alignment.objective import chunked_terms, position_terms

N, D, V = 11, 6, 23


def inputs(dtype: torch.dtype = torch.float64) -> tuple[dict[int, Tensor], Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = {level: torch.randn(N, D, generator=g).to(dtype).requires_grad_() for level in range(3)}
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=g), torch.rand(N, generator=g, dtype=torch.float64)


OBJECTIVES = [
    Objective(),
    Objective(target_grad="flow"),
    Objective(edges=(Edge(0, 2, 1.5, 0.2),), hard_levels=(0, 1, 2)),
    Objective(edges=(), lambda_hard=1.0),
    Objective(edges=(Edge(0, 1), Edge(1, 0, 1.0, 0.0)), lambda_hard=0.0),
]


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("students", [(0, 1, 2), (1,), (0,)])
def test_values_and_gradients_equal_the_dense_ones(objective: Objective, chunk: int, students: tuple[int, ...]) -> None:
    hidden, weight, targets, weights = inputs()
    dense, terms = position_terms(
        {k: h @ weight.T for k, h in hidden.items()}, targets, objective, students, monitor=True
    )
    expected = (dense * weights).sum()
    chunked = Objective(**{**vars(objective), "chunk": chunk})
    found, values = chunked_terms(hidden, weight, targets, weights, chunked, students)
    torch.testing.assert_close(found, expected)
    assert values.keys() == terms.keys()
    for name, value in terms.items():
        torch.testing.assert_close(values[name], value)
        assert not values[name].requires_grad
    if expected.requires_grad:
        leaves = [*hidden.values(), weight]
        for ours, theirs in zip(_gradients(found * 0.7, leaves), _gradients(expected * 0.7, leaves), strict=True):
            torch.testing.assert_close(ours, theirs)


def plain(hidden: dict[int, Tensor], weight: Tensor, targets: Tensor, weights: Tensor, objective: Objective) -> Tensor:
    """Eq. 6-7 on whole logits, with softmax written out."""

    def softmax(z: Tensor, tau: float) -> Tensor:
        e = torch.exp((z - z.max(-1, keepdim=True).values.detach()) / tau)
        return e / e.sum(-1, keepdim=True)

    z = {level: h @ weight.T for level, h in hidden.items()}
    total = -objective.lambda_hard * softmax(z[0], 1.0)[torch.arange(N), targets].log()
    for edge in objective.edges:
        teacher = z[edge.teacher] if objective.target_grad == "flow" else z[edge.teacher].detach()
        p, q = softmax(teacher, objective.tau), softmax(z[edge.student], objective.tau)
        forward, reverse = (p * (p.log() - q.log())).sum(-1), (q * (q.log() - p.log())).sum(-1)
        distance = edge.alpha * forward + (1 - edge.alpha) * reverse
        total = total + (1 - objective.lambda_hard) * objective.tau**2 * edge.gamma * distance
    return (total * weights).sum()


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("target_grad", ["detach", "flow"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_gradients_are_those_of_the_formula(alpha: float, target_grad: Any, chunk: int) -> None:
    hidden, weight, targets, weights = inputs()
    edges = (Edge(0, 1, 3.0, alpha), Edge(1, 2, 2.0, alpha))
    objective = Objective(edges=edges, target_grad=target_grad, chunk=chunk)
    found, _ = chunked_terms(hidden, weight, targets, weights, objective)
    expected = plain(hidden, weight, targets, weights, objective)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    leaves = [*hidden.values(), weight]
    ours, theirs = _gradients(found, leaves), _gradients(expected, leaves)
    assert (float(ours[2].abs().max()) > 0) == (target_grad == "flow")
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, targets, weights = inputs()
    weight.requires_grad_(False)
    hidden[1] = hidden[1].detach()
    hidden[2] = hidden[2].detach()
    loss, _ = chunked_terms(hidden, weight, targets, weights, Objective(chunk=3), (0,))
    loss.backward()
    assert hidden[0].grad is not None
    assert weight.grad is None


def test_bfloat16_inputs_give_float32_logits() -> None:
    hidden, weight, targets, weights = inputs(torch.bfloat16)
    wide = {k: h.detach().float().requires_grad_() for k, h in hidden.items()}
    expected, _ = chunked_terms(wide, weight.detach().float(), targets, weights, Objective())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_terms(hidden, weight, targets, weights, Objective())
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    assert hidden[0].grad is not None
    assert hidden[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden[0].grad, wide[0].grad.to(torch.bfloat16))  # type: ignore[union-attr]


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor of logits' width that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # [D, V] is the head itself
            if isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.shape[-1] == V and len(tensor) != D:
                self.numel = max(self.numel, tensor.numel())
        return out


def test_a_level_that_no_term_reads_has_no_logits() -> None:
    hidden, weight, targets, weights = inputs()
    products: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default and args[1].shape == (D, V):
                products.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Counting():
        loss, _ = chunked_terms(hidden, weight, targets, weights, Objective(), (0,))
    assert products == [N, N], "x0 and its teacher x1; x2 teaches x1 alone"
    loss.backward()


def test_logits_of_all_positions_never_exist() -> None:
    hidden, weight, targets, weights = inputs()
    with _Largest() as largest:
        loss, _ = chunked_terms(hidden, weight, targets, weights, Objective(chunk=2))
        loss.backward()
    assert largest.numel == 2 * V
