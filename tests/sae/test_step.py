"""The sparse step against autograd through a dense one, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sae.step import AuxK, feature_major, step
from sae.topk import TopKSAE


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


def coder_and_batch(seed: int = 0, n: int = 60) -> tuple[TopKSAE, Tensor]:
    torch.manual_seed(seed)
    coder = TopKSAE(16, 64, 5).double()
    with torch.no_grad():
        coder.W_enc.add_(0.3 * torch.randn(16, 64, dtype=torch.float64))
        coder.b_dec.normal_()
        coder.b_enc.normal_(std=0.1)
    return coder, torch.randn(n, 16, dtype=torch.float64)


@pytest.mark.parametrize("stored", ["feature_major", "input_major"])
@pytest.mark.parametrize(
    "aux",
    [
        None,
        AuxK(torch.tensor([], dtype=torch.int64), 4),
        AuxK(torch.tensor([3]), 4),
        AuxK(torch.tensor([1, 5, 9, 20, 33, 60]), 2, coefficient=0.7),
        AuxK(torch.arange(64), 8),
    ],
    ids=["none", "no_dead", "fewer_than_k", "more_than_k", "all_dead"],
)
def test_loss_and_gradients_equal_dense_autograd(aux: AuxK | None, stored: str) -> None:
    coder, x = coder_and_batch()
    if stored == "feature_major":
        feature_major(coder)
    expected = dense_loss(coder, x, 0.3, aux)
    (2.5 * expected).backward()
    gradients = {name: p.grad for name, p in coder.named_parameters()}
    coder.zero_grad(set_to_none=True)
    out = step(coder, x, 0.3, aux)
    (2.5 * out.loss).backward()
    assert abs(float(out.loss.detach()) - float(expected.detach())) < 1e-12
    for name, parameter in coder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12, msg=name)
        assert parameter.grad.stride() == parameter.stride()


def test_auxiliary_term_moves_the_encoder_and_not_the_reconstruction() -> None:
    coder, x = coder_and_batch(1)
    dead = torch.tensor([2, 40])
    step(coder, x, 0.0, AuxK(dead, 4)).loss.backward()
    assert coder.W_enc.grad is not None
    moved = coder.W_enc.grad.abs().sum(0).nonzero().squeeze(1).tolist()
    assert moved == dead.tolist()


def test_features_that_are_zero_get_no_gradient() -> None:
    coder, x = coder_and_batch(2)
    with torch.no_grad():
        coder.b_enc.fill_(-100.0)
    out = step(coder, x)
    out.loss.backward()
    assert not bool(out.values.any())
    assert coder.W_enc.grad is not None
    assert not bool(coder.W_enc.grad.any())
    assert coder.b_dec.grad is not None
    torch.testing.assert_close(coder.b_dec.grad, 2 * (coder.b_dec - x).mean(0).detach())


def test_an_error_that_does_not_vary_gives_no_auxiliary_loss() -> None:
    coder, x = coder_and_batch(3)
    same = x[:1].expand(8, -1).contiguous()
    out = step(coder, same, 1.0, AuxK(torch.tensor([1]), 2))
    out.loss.backward()
    assert bool(torch.isfinite(out.loss.detach()))
    assert all(bool(torch.isfinite(p.grad).all()) for p in coder.parameters() if p.grad is not None)


def test_step_agrees_with_encode_and_decode() -> None:
    coder, x = coder_and_batch(4)
    out = step(coder, x, 1.0)
    codes = coder.encode(x)
    expected = (x - coder.decode(codes)).square().sum(1).mean()
    torch.testing.assert_close(out.mse, expected.detach())
    order = out.indices.sort(-1)
    assert torch.equal(order.values, codes.indices)


def test_float32_gradients_are_close_to_float64() -> None:
    coder, x = coder_and_batch(5)
    step(coder, x).loss.backward()
    exact = {name: p.grad.clone() for name, p in coder.named_parameters() if p.grad is not None}
    single = TopKSAE(16, 64, 5)
    single.load_state_dict({name: p.float() for name, p in coder.state_dict().items()})
    step(single, x.float()).loss.backward()
    for name, parameter in single.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad.double() - exact[name]).abs().max()) < 1e-5 * float(exact[name].abs().max())
