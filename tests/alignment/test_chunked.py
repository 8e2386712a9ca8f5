"""The chunked objective against the dense one on whole logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remind.alignment.config import Edge, Objective
from remind.alignment.objective import Head, chunked_terms, position_terms
from remind.alignment.targets import topk_targets

N, D, V = 11, 6, 23


def inputs(dtype: torch.dtype = torch.float64, biased: bool = False) -> tuple[dict[int, Tensor], Head, Tensor, Tensor]:
    """Hidden states, the head, targets and weights of positions."""
    g = torch.Generator().manual_seed(0)
    hidden = {level: torch.randn(N, D, generator=g).to(dtype).requires_grad_() for level in range(3)}
    head = Head(torch.randn(V, D, generator=g).to(dtype).requires_grad_())
    targets, weights = torch.randint(0, V, (N,), generator=g), torch.rand(N, generator=g, dtype=torch.float64)
    if biased:
        head = Head(head.weight, torch.randn(V, generator=g).to(dtype).requires_grad_(), 1.4, 3.0)
    return hidden, head, targets, weights


OBJECTIVES = [
    Objective(),
    Objective(target_grad="flow"),
    Objective(edges=(Edge(0, 2, 1.5, 0.2),), hard_levels=(0, 1, 2)),
    Objective(edges=(), lambda_hard=1.0),
    Objective(edges=(Edge(0, 1), Edge(1, 0, 1.0, 0.0)), lambda_hard=0.0),
]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias, scale and cap"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("students", [(0, 1, 2), (1,), (0,)])
def test_values_and_gradients_equal_the_dense_ones(
    objective: Objective, biased: bool, students: tuple[int, ...]
) -> None:
    hidden, head, targets, weights = inputs(biased=biased)
    logits = {level: h @ head.weight.T for level, h in hidden.items()}
    if head.bias is not None:
        logits = {level: 3.0 * torch.tanh(1.4 * (z + head.bias) / 3.0) for level, z in logits.items()}
    dense, terms = position_terms(logits, targets, objective, students, monitor=True)
    expected = (dense * weights).sum()
    leaves = [*hidden.values(), *(part for part in head[:2] if part is not None)]
    theirs = _gradients(expected * 0.7, leaves) if expected.requires_grad else []
    for chunk in (1, 4, 100):
        found, values = chunked_terms(hidden, head, targets, weights, replace(objective, chunk=chunk), students)
        torch.testing.assert_close(found, expected)
        assert values.keys() == terms.keys()
        for name, value in terms.items():
            torch.testing.assert_close(values[name], value)
            assert not values[name].requires_grad
        if theirs:
            torch.testing.assert_close(_gradients(found * 0.7, leaves), theirs)


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def test_bfloat16_inputs_give_float32_logits() -> None:
    hidden, head, targets, weights = inputs(torch.bfloat16, biased=True)
    wide = {k: h.detach().float().requires_grad_() for k, h in hidden.items()}
    expected, _ = chunked_terms(wide, head.wide(torch.float32), targets, weights, Objective())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_terms(hidden, head, targets, weights, Objective())
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    assert hidden[0].grad is not None
    assert hidden[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden[0].grad, wide[0].grad.to(torch.bfloat16))  # type: ignore[union-attr]


class Logits(TorchDispatchMode):
    """The number of rows of each tensor of logits' width that an operation makes; [D, V] is the head itself."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[1].shape == (D, V):
            self.products.append(len(args[0]))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.shape[-1] == V and len(tensor) != D:
                self.largest = max(self.largest, len(tensor))
        return out


def test_logits_exist_a_chunk_at_a_time_of_levels_that_are_read() -> None:
    hidden, head, targets, weights = inputs()
    with Logits() as seen:
        loss, _ = chunked_terms(hidden, head, targets, weights, Objective(), (0,))
    assert seen.products == [N, N], "x0 and its teacher x1; x2 teaches x1 alone"
    with Logits() as seen:
        loss, _ = chunked_terms(hidden, head, targets, weights, Objective(chunk=2))
        loss.backward()
    assert seen.largest == 2


def test_top_k_targets_are_probabilities_in_order_and_keep_a_small_rest() -> None:
    hidden, head, _, _ = inputs(biased=True)
    indices, log_probs = topk_targets(hidden[1], head, 2.0, 4, chunk=2)
    whole = (3.0 * torch.tanh(1.4 * (hidden[1] @ head.weight.T + head.bias) / 3.0) / 2.0).log_softmax(-1)
    largest = whole.topk(4)
    assert torch.equal(indices.long(), largest.indices)
    torch.testing.assert_close(log_probs[:, :4], largest.values)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    # a rest of 1e-13, which 1 - sum in float32 would make 0 or 1e-7
    weight = torch.tensor([[60.0, 0, 0], [0, 0, 0], [-1, 0, 0]])
    low = topk_targets(torch.eye(3)[:1], Head(weight), 2.0, 1)[1]
    assert float(low[0, 1]) == pytest.approx(math.log(math.exp(-30) + math.exp(-30.5)), rel=1e-5)
