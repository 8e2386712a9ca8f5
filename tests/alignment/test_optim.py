"""Parameter groups and the learning rate; AdamW with moments of 8 bits against AdamW in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remind.alignment.adamw8bit import AdamW8bit, dequantise, generator_of, quantise, random_bits, to_bfloat16
from remind.alignment.model import trainable
from remind.alignment.optim import learning_rate, make_optimizer

CPU = torch.device("cpu")
STEPS = 240


def test_norms_and_embeddings_do_not_decay(make_model: Any) -> None:
    model = trainable(make_model(), None)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model, "adamw", 1e-3, 0.1).param_groups
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in groups)
    assert all("norm" in name or "embed" in name for name in plain)
    assert not any("norm" in name or "embed" in name for name in decayed)
    assert "lm_head.weight" in decayed
    # the vision tower is in neither
    assert decayed | plain == {name for name in names.values() if "visual" not in name}
    tied: Any = trainable(make_model(tie=True), None)
    plain_group = make_optimizer(tied, "adamw", 1e-3, 0.1).param_groups[1]["params"]
    assert any(p is tied.lm_head.weight for p in plain_group)


def test_the_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.1, "cosine") for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert {learning_rate(step, 100, 2.0, 0.0, "constant") for step in range(100)} == {2.0}
    assert learning_rate(0, 1, 2.0, 1.0, "cosine") == 2.0


# moments of 8 bits


def moved(start: Tensor, make: Callable[..., torch.optim.Optimizer], noise: float, **settings: Any) -> Tensor:
    """How far weights of `start`'s type get in gradients whose sizes span some orders, float64."""
    generator = torch.Generator().manual_seed(3)
    signal = torch.randn(start.shape, generator=generator) * torch.randn(start.shape, generator=generator).exp()
    parameter = nn.Parameter(start.clone())
    optimizer = make([parameter], **settings)
    for _ in range(STEPS):
        grad = signal * (1 + noise * torch.randn(start.shape, generator=generator))
        parameter.grad = grad.to(start.dtype)
        optimizer.step()
    return parameter.detach().double() - start.double()


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("shape", [(40, 300), (7, 16, 40), (333,)])
def test_it_follows_adamw_in_float64(shape: tuple[int, ...], noise: float) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    exact = moved(start.double(), torch.optim.AdamW, noise, **settings)
    found = moved(start, AdamW8bit, noise, **settings)
    error = float((found - exact).norm() / exact.norm())
    if len(shape) == 1:
        # too few to be worth 8 bits: what is left is float32
        assert error < 1e-4
        return
    # codes are 6 to 8 % apart, rounded without bias: single weights differ, their mean movement does not
    assert error < 0.2
    assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1.0, abs=0.04)


def test_weights_in_bfloat16_move_at_a_rate_of_a_hundred_thousandth() -> None:
    sign = torch.where(torch.rand(64, 512, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
    start = sign * 0.02
    settings = {"lr": 1e-5, "weight_decay": 0.0}
    exact = moved(start.double(), torch.optim.AdamW, 0.0, **settings)
    assert float(exact.abs().mean()) == pytest.approx(STEPS * 1e-5, rel=1e-3)
    plain = moved(start.bfloat16(), torch.optim.AdamW, 0.0, **settings)
    assert not plain.any()
    found = moved(start.bfloat16(), AdamW8bit, 0.0, **settings)
    assert float((found * exact.sign()).mean()) == pytest.approx(STEPS * 1e-5, rel=0.03)


def test_a_state_takes_two_bytes_a_weight() -> None:
    parameter = nn.Parameter(torch.randn(64, 1024).bfloat16())
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = sum(value.numel() * value.element_size() for value in optimizer.state[parameter].values())
    assert state < 2.04 * parameter.numel()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_codes_are_right_on_average_and_near(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(3, 600, generator=generator) * torch.randn(3, 600, generator=generator).exp()
    value[0, 256:512] = 0
    value[1, 5] = 0
    value = value if kind == torch.int8 else value.abs()
    codes, scale = torch.empty(3, 600, dtype=kind), torch.empty(3, 3)
    n, mean = 2000, torch.zeros(3, 600, dtype=torch.float64)
    for draw in range(n):
        quantise(value, codes, scale, random_bits(value, 1, generator_of(CPU, draw))[0])
        found = dequantise(codes, scale).double()
        mean += found / n
    largest = torch.tensor([float(block.abs().max()) for row in value for block in row.split(256)]).view(3, 3)
    assert torch.equal(scale, largest)
    spread = scale.repeat_interleave(256, 1)[:, :600].double()
    octaves = 14 / 126 if kind == torch.int8 else 24 / 254
    near = value.double().abs() * (2**octaves - 1) + spread * 2.0**-14
    assert torch.all((found - value).abs() <= near * (1 + 1e-4))
    assert torch.all((mean - value).abs() <= 5 * near / (2 * math.sqrt(n)) + 1e-6 * spread)
    assert torch.equal(found == 0, value == 0) or kind == torch.int8


def test_equal_seeds_are_equal_to_the_bit_and_others_are_not() -> None:
    start = torch.randn(32, 64).bfloat16()
    one, two, other = (moved(start, AdamW8bit, 1.0, lr=1e-5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


# stochastic rounding


def test_the_mean_is_exact() -> None:
    # a sixth, a half and a hundredth of the way between neighbours, of both signs
    fractions = torch.tensor([1 / 6, 1 / 2, 1 / 100])
    spacing = 2.0**-13
    exact = torch.cat([0.02 * 0 + 2.0**-6 + fractions * spacing, -(2.0**-6) - fractions * spacing])
    n = 200_000
    value = exact.expand(n, -1).contiguous()
    rounded = to_bfloat16(value, random_bits(value, 1, generator_of(CPU, 1))[0]).double()
    away = (rounded.abs() > 2.0**-6).double()
    assert set(rounded.abs().unique().tolist()) == {2.0**-6, 2.0**-6 + spacing}
    # five standard errors of a share
    expected = torch.cat([fractions, fractions]).double()
    error = 5 * (expected * (1 - expected) / n).sqrt()
    assert torch.all((away.mean(0) - expected).abs() < error)


def test_what_is_exact_stays() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf"), float("nan")])
    # the NaN of GPUs, whose bits are all ones, would carry over into the sign
    ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    value = torch.cat([special, ones])
    rounded = to_bfloat16(value, torch.full(value.shape, 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(rounded, value.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_random_numbers_depend_on_their_place_alone() -> None:
    like = torch.empty(1000)
    first = random_bits(like, 3, generator_of(CPU, 0, 5, 2))
    torch.rand(7)
    again = random_bits(like, 3, generator_of(CPU, 0, 5, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for place in ((1, 5, 2), (0, 6, 2), (0, 5, 3), (0, 52), (0, 5, 2, 0)):
        assert not torch.equal(first[0], random_bits(like, 1, generator_of(CPU, *place))[0])
    assert not torch.equal(first[0], first[1])
    assert 0 <= int(first[2].min()) < 1000 < 64_000 < int(first[2].max()) < 1 << 16
