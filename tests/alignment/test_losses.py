"""pra_loss against Eq. 6-7 and Eq. 21 written out in float64, one position and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from remind.alignment.objective import pra_loss
from remind.core.errors import DataError


def softmax(z: Tensor, tau: float = 1.0) -> Tensor:
    e = torch.exp((z - z.max().detach()) / tau)
    return e / e.sum()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return sum((p[v] * (p[v].log() - q[v].log()) for v in range(len(p))), torch.zeros((), dtype=p.dtype))


def reference(
    z0: Tensor, z1: Tensor, z2: Tensor, y: Tensor, lam: float, tau: float, alpha: Any, gamma: Any, flow: bool
) -> dict[str, Tensor]:
    """Eq. 6-7 as printed; teachers are constants unless `flow`."""
    n = len(y)
    hard = -sum(softmax(z0[k])[y[k]].log() for k in range(n)) / n
    dist = []
    for i, (student, teacher) in enumerate(((z0, z1), (z1, z2))):
        total: Any = 0
        for k in range(n):
            p_student = softmax(student[k], tau)
            p_teacher = softmax(teacher[k] if flow else teacher[k].detach(), tau)
            total = total + alpha[i] * kl(p_teacher, p_student) + (1 - alpha[i]) * kl(p_student, p_teacher)
        dist.append(total / n)
    jsd = []
    for student, teacher in ((z0, z1), (z1, z2)):
        pairs = [(softmax(student[k], tau), softmax(teacher[k], tau)) for k in range(n)]
        jsd.append(sum(kl(p, (p + q) / 2) / 2 + kl(q, (p + q) / 2) / 2 for p, q in pairs) / n)
    total = lam * hard + (1 - lam) * tau**2 * (gamma[0] * dist[0] + gamma[1] * dist[1])
    return {"total": total, "hard": hard, "dist01": dist[0], "dist12": dist[1], "jsd01": jsd[0], "jsd12": jsd[1]}


def logits(seed: int, length: int = 4, vocab: int = 7, scale: float = 3.0) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = [torch.randn(length, vocab, generator=g, dtype=torch.float64) * scale for _ in range(3)]
    return [x.requires_grad_() for x in z], torch.randint(0, vocab, (length,), generator=g)


@given(
    seed=st.integers(0, 10**6), lam=st.floats(0.01, 1), tau=st.floats(0.3, 5), a0=st.floats(0, 1), a1=st.floats(0, 1),
    g0=st.floats(0, 9), g1=st.floats(0, 9), scale=st.floats(0.01, 20), flow=st.booleans(),
)  # fmt: skip
@example(1, 0.2, 2.0, 0.5, 0.5, 3.0, 3.0, 3.0, False)
@example(1, 0.0, 3.5, 0.0, 1.0, 3.0, 0.0, 3.0, True)
@example(1, 1.0, 0.5, 0.9, 0.1, 2.0, 0.0, 3.0, True)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_are_those_of_the_equations(
    seed: int, lam: float, tau: float, a0: float, a1: float, g0: float, g1: float, scale: float, flow: bool
) -> None:
    z, y = logits(seed, 2, 5, scale)
    found = pra_loss(*z, y, lam, tau, (a0, a1), (g0, g1), "flow" if flow else "detach")
    expected = reference(*z, y, lam, tau, (a0, a1), (g0, g1), flow)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-8, atol=1e-10)
    assert found.dist01.item() >= -1e-12
    assert -1e-12 <= float(found.jsd12) <= math.log(2) + 1e-12
    assert not found.jsd01.requires_grad
    assert not found.jsd12.requires_grad
    grads = [torch.autograd.grad(t, z, allow_unused=True, retain_graph=True) for t in (found.total, expected["total"])]
    for ours, theirs in zip(*grads, strict=True):
        zero = torch.zeros_like(z[0])
        torch.testing.assert_close(
            zero if ours is None else ours, zero if theirs is None else theirs, atol=1e-8, rtol=1e-8
        )


def test_equal_distributions_have_no_distance() -> None:
    z, y = logits(7)
    found = pra_loss(z[0], z[0], z[0].detach() + 5.0, y)
    for value in (found.dist01, found.dist12, found.jsd01, found.jsd12):
        assert abs(value.item()) < 1e-14
    torch.testing.assert_close(found.total, 0.2 * found.hard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, 1e4, 1e30])
def test_extreme_logits_give_numbers(size: float, dtype: torch.dtype) -> None:
    """Probabilities that are exactly 0 on either side must not make 0 * inf."""
    z0 = torch.tensor([[size, 0.0, -size], [0.0, 0.0, 0.0]], dtype=dtype).requires_grad_()
    z1 = torch.tensor([[size, -size, 0.0], [0.0, size, 0.0]], dtype=dtype).requires_grad_()
    z2 = torch.tensor([[0.0, size, 0.0], [0.0, size, size]], dtype=dtype)
    found = pra_loss(z0, z1, z2, torch.tensor([0, 1]))
    found.total.backward()
    assert all(not value.isnan() for value in found)
    for z in (z0, z1):
        assert z.grad is not None
        assert z.grad.isfinite().all()


def test_tokens_masked_with_minus_infinity_in_all_levels() -> None:
    z, y = logits(8, 3, 6)
    masked = [torch.cat([x.detach(), torch.full((3, 1), -torch.inf, dtype=x.dtype)], 1).requires_grad_() for x in z]
    found = pra_loss(*masked, y)
    torch.testing.assert_close(found.total, pra_loss(*z, y).total)
    found.total.backward()
    assert masked[0].grad is not None
    assert masked[0].grad.isfinite().all()


def test_low_precision_is_computed_in_float32() -> None:
    z, y = logits(9)
    low = [x.detach().to(torch.bfloat16) for x in z]
    found, wide = pra_loss(*low, y), pra_loss(*(x.float() for x in low), y)
    assert found.total.dtype == torch.float32
    assert torch.equal(found.total, wide.total)
    assert pra_loss(*z, y).total.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits1": torch.zeros(3, 5)}, "one shape"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "L 1 or more"),
        ({"targets": torch.tensor([0, 5])}, "from 0 to 4"),
        ({"targets": torch.tensor([0, -1])}, "from 0 to 4"),
        ({"targets": torch.tensor([0.0, 1.0])}, "token ids"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {f"logits{i}": torch.zeros(2, 5) for i in range(3)} | {"targets": torch.tensor([0, 1])}
    with pytest.raises(DataError, match=message):
        pra_loss(**(given_ | change))
