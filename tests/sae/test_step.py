"""Gradients of the sparse step against autograd through a dense one, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from sae.step import AuxK, Gradients, feature_major, gradients
from sae.topk import TopKSAE

NAMES = ("W_enc", "b_enc", "W_dec", "b_dec")


def dense_loss(coder: TopKSAE, x: Tensor, mse_scale: float, aux: AuxK | None) -> Tensor:
    pre = (x - coder.b_dec) @ coder.W_enc + coder.b_enc
    values, indices = pre.topk(coder.k)
    z = torch.zeros_like(pre).scatter(1, indices, values.relu())
    output = z @ coder.W_dec + coder.b_dec
    loss = mse_scale * ((x - output) ** 2).sum(1).mean()
    if aux is not None and len(aux.dead):
        error = (x - output).detach()
        alive = torch.ones(coder.d_sae, dtype=torch.bool)
        alive[aux.dead] = False
        values, indices = pre.masked_fill(alive, -torch.inf).topk(min(aux.k, len(aux.dead)))
        z_aux = torch.zeros_like(pre).scatter(1, indices, values.relu())
        share = ((z_aux @ coder.W_dec - error) ** 2).mean() / ((error - error.mean(0)) ** 2).mean()
        loss = loss + aux.coefficient * share.nan_to_num(0)
    return loss


def dense_gradients(coder: TopKSAE, loss: Tensor) -> dict[str, Tensor]:
    """By autograd, in the layout of `Gradients`."""
    grads = torch.autograd.grad(loss, [getattr(coder, name) for name in NAMES])
    return {name: grad.t() if name == "W_enc" else grad for name, grad in zip(NAMES, grads, strict=True)}


def assert_close(got: Gradients, expected: Mapping[str, Tensor], rtol: float = 0, atol: float = 1e-12) -> None:
    for name in NAMES:
        torch.testing.assert_close(getattr(got, name), expected[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("dead", [None, [], [3], [*range(64)], [1, 5, 9, 20, 33, 60]])
@pytest.mark.parametrize("tokens", [60, 1300])
def test_loss_and_gradients_equal_dense_autograd(dead: list[int] | None, tokens: int, make_coder: Any) -> None:
    coder, x = make_coder(16, 64, 5).requires_grad_(), torch.randn(tokens, 16, dtype=torch.float64)
    feature_major(coder)
    aux = None if dead is None else AuxK(torch.tensor(dead, dtype=torch.int64), 4, 0.7)
    expected = dense_loss(coder, x, 0.3, aux)
    out, grads = gradients(coder, x, 0.3, aux)
    assert abs(float(out.loss) - float(expected.detach())) < 1e-12
    assert_close(grads, dense_gradients(coder, expected))
    torch.testing.assert_close(grads.radial, (grads.W_dec * coder.W_dec.detach()).sum(1), rtol=0, atol=1e-12)
    assert torch.equal(out.indices.sort(-1).values, coder.encode(x).indices)


def test_bfloat16_chooses_the_features_and_the_rest_is_exact(make_coder: Any) -> None:
    coder, x = make_coder(16, 64, 5).float().requires_grad_(), torch.randn(200, 16)
    out, grads = gradients(coder, x, 0.3, products=torch.bfloat16)
    pre = (x - coder.b_dec) @ coder.W_enc + coder.b_enc
    # nearly the largest, with exact values
    torch.testing.assert_close(out.values, pre.gather(1, out.indices).relu(), rtol=1e-5, atol=1e-5)
    assert bool((out.values.min(1).values >= pre.topk(5).values[:, -1] - 0.1).all())
    z = torch.zeros_like(pre).scatter(1, out.indices, pre.gather(1, out.indices).relu())
    loss = 0.3 * ((x - (z @ coder.W_dec + coder.b_dec)) ** 2).sum(1).mean()
    assert_close(grads, dense_gradients(coder, loss), rtol=1e-4, atol=1e-5)
