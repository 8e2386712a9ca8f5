"""pra_loss against Eq. 6-7 and Eq. 21 written out in float64; the chunked form of it, in the precision of its logits.

That the chunked one equals the equations, through models, with teachers of all kinds: test_gradients.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from remind.alignment.config import Objective
from remind.alignment.objective import Head, chunked_terms, pra_loss
from remind.alignment.targets import topk_targets


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1).mean()


def reference(
    z: list[Tensor], y: Tensor, lam: float, tau: float, alpha: Any, gamma: Any, flow: bool
) -> dict[str, Tensor]:
    """Eq. 6-7 as printed; teachers are constants unless `flow`."""
    found = {"hard": -(z[0].exp() / z[0].exp().sum(-1, keepdim=True)).log()[torch.arange(len(y)), y].mean()}
    for i in range(2):
        p, q = ((level / tau).softmax(-1) for level in (z[i], z[i + 1] if flow else z[i + 1].detach()))
        found[f"dist{i}{i + 1}"] = alpha[i] * kl(q, p) + (1 - alpha[i]) * kl(p, q)
        found[f"jsd{i}{i + 1}"] = (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    soft = gamma[0] * found["dist01"] + gamma[1] * found["dist12"]
    return found | {"total": lam * found["hard"] + (1 - lam) * tau**2 * soft}


@given(
    seed=st.integers(0, 10**6), lam=st.floats(0.01, 1), tau=st.floats(0.3, 5), a0=st.floats(0, 1), a1=st.floats(0, 1),
    g0=st.floats(0, 9), g1=st.floats(0, 9), scale=st.floats(0.01, 20), flow=st.booleans(),
)  # fmt: skip
@example(1, 0.0, 3.5, 0.0, 1.0, 3.0, 0.0, 3.0, True)
@example(1, 1.0, 0.5, 0.9, 0.1, 2.0, 0.0, 3.0, True)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_are_those_of_the_equations(
    seed: int, lam: float, tau: float, a0: float, a1: float, g0: float, g1: float, scale: float, flow: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    z = [(torch.randn(2, 5, generator=g, dtype=torch.float64) * scale).requires_grad_() for _ in range(3)]
    y = torch.randint(0, 5, (2,), generator=g)
    found = pra_loss(*z, y, lam, tau, (a0, a1), (g0, g1), "flow" if flow else "detach")
    expected = reference(z, y, lam, tau, (a0, a1), (g0, g1), flow)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-8, atol=1e-10)
    assert not found.jsd01.requires_grad
    assert not found.jsd12.requires_grad
    grads = [torch.autograd.grad(t, z, allow_unused=True, retain_graph=True) for t in (found.total, expected["total"])]
    for ours, theirs in zip(*grads, strict=True):
        one, other = (torch.zeros_like(z[0]) if grad is None else grad for grad in (ours, theirs))
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, 1e30])
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


# in chunks, from hidden states


def test_bfloat16_inputs_give_float32_logits() -> None:
    g = torch.Generator().manual_seed(0)
    narrow = [torch.randn(11, 6, generator=g).bfloat16().requires_grad_() for _ in range(3)]
    wide = [h.detach().float().requires_grad_() for h in narrow]
    head = Head(torch.randn(23, 6, generator=g).bfloat16(), None, 1.4, 3.0)
    given = (torch.randint(0, 23, (11,), generator=g), torch.rand(11, generator=g), Objective())
    expected, _ = chunked_terms(dict(enumerate(wide)), head.wide(torch.float32), *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_terms(dict(enumerate(narrow)), head, *given)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(loss, hidden[0])[0] for loss, hidden in ((found, narrow), (expected, wide))]
    torch.testing.assert_close(gradients[0], gradients[1].bfloat16())


def test_top_k_targets_keep_a_small_rest() -> None:
    """Of 1e-13, which 1 - sum in float32 would make 0 or 1e-7."""
    weight = torch.tensor([[60.0, 0, 0], [0, 0, 0], [-1, 0, 0]])
    indices, log_probs = topk_targets(torch.eye(3)[:1], Head(weight), 2.0, 1)
    assert indices.tolist() == [[0]]
    assert float(log_probs[0, 1]) == pytest.approx(math.log(math.exp(-30) + math.exp(-30.5)), rel=1e-5)
