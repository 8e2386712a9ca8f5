"""The sparse step against autograd through a dense one, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sae.step import AuxK, Share, feature_major, step
from sae.topk import TopKSAE


def dense_loss(coder: TopKSAE, x: Tensor, mse_scale: float, aux: AuxK | None) -> Tensor:
    pre = (x - coder.b_dec) @ coder.W_enc + coder.b_enc
    values, indices = pre.topk(coder.k)
    z = torch.zeros_like(pre).scatter(1, indices, values.relu())
    output = z @ coder.W_dec + coder.b_dec
    loss = mse_scale * ((x - output) ** 2).sum(1).mean()
    if aux is not None and len(aux.dead):
        pre, error = pre[:: aux.stride], (x - output).detach()[:: aux.stride]
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
        AuxK(torch.tensor([1, 5, 9, 20, 33, 60]), 2, coefficient=0.7, stride=7),
    ],
    ids=["none", "no_dead", "fewer_than_k", "more_than_k", "all_dead", "every_seventh_token"],
)
@pytest.mark.parametrize("tokens", [60, 1300])
def test_loss_and_gradients_equal_dense_autograd(aux: AuxK | None, stored: str, tokens: int) -> None:
    coder, x = coder_and_batch(n=tokens)
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


def test_shares_of_a_batch_add_up_to_the_whole() -> None:
    coder, x = coder_and_batch(6, 60)
    aux = AuxK(torch.tensor([1, 5, 9, 20]), 2, coefficient=0.7, stride=4)
    whole = step(coder, x, 0.3, aux)
    whole.loss.backward()
    gradients = {name: p.grad.clone() for name, p in coder.named_parameters() if p.grad is not None}
    coder.zero_grad(set_to_none=True)
    # what each of the sums is over all parts, noted while the whole is computed, in the order they are asked for
    sums: list[Tensor] = []
    step(coder, x, 0.3, aux, Share(60, lambda tensor: sums.append(tensor.clone()) or tensor))
    losses = []
    for rows in (slice(0, 20), slice(20, 60)):
        known = iter(sums)
        part = step(coder, x[rows], 0.3, aux, Share(60, lambda tensor, known=known: next(known)))
        part.loss.backward()
        losses.append(part.loss.detach())
    torch.testing.assert_close(torch.stack(losses).sum(), whole.loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in coder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12, msg=name)


def test_bfloat16_chooses_the_features_and_the_rest_is_exact() -> None:
    coder, x = coder_and_batch(7, 200)
    coder, x = coder.float(), x.float()
    out = step(coder, x, products=torch.bfloat16)
    out.loss.backward()
    with torch.no_grad():
        pre = (x - coder.b_dec) @ coder.W_enc + coder.b_enc
        torch.testing.assert_close(out.values, pre.gather(1, out.indices).relu())
        # what was chosen is as large as what should have been, up to bfloat16's eight bits
        best = pre.topk(coder.k).values
        assert float((best.sum(1) - pre.gather(1, out.indices).sum(1)).max()) < 0.02 * float(best.sum(1).max())
        same = (out.indices.sort(1).values == coder.encode(x).indices).all(1)
    assert 0.7 < float(same.double().mean()) <= 1
    gradients = {name: p.grad for name, p in coder.named_parameters()}
    coder.zero_grad(set_to_none=True)
    pre = (x - coder.b_dec) @ coder.W_enc + coder.b_enc
    z = torch.zeros_like(pre).scatter(1, out.indices, pre.gather(1, out.indices).relu())
    (x - z @ coder.W_dec - coder.b_dec).square().sum(1).mean().backward()
    for name, parameter in coder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation inside leaves behind, by floating or not."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = {True: 0, False: 0}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                kind = tensor.is_floating_point()
                self.numbers[kind] = max(self.numbers[kind], held)
        return out


@pytest.mark.parametrize("aux", [None, AuxK(torch.arange(0, 4096, 40), 8)], ids=["alive", "dead"])
def test_nothing_of_tokens_by_features_or_actives_by_width_is_held(aux: AuxK | None) -> None:
    tokens, d_in, d_sae, k = 2048, 96, 4096, 32
    torch.manual_seed(0)
    coder = feature_major(TopKSAE(d_in, d_sae, k))
    x = torch.randn(tokens, d_in)
    with Largest() as largest:
        step(coder, x, 1.0, aux).loss.backward()
    assert largest.numbers[True] == 1024 * d_sae  # pre-activations of one chunk
    assert largest.numbers[True] < min(tokens * d_sae, tokens * k * d_in)
    assert largest.numbers[False] <= 4 * tokens * k
