"""Stochastic rounding: one of the two neighbours, right on average, and a function of where it is used."""

from __future__ import annotations

import torch

from remind.alignment.rounding import generator_of, random_bits, to_bfloat16, up

CPU = torch.device("cpu")


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


def test_up_is_never_at_nothing_and_always_at_one() -> None:
    bits = torch.tensor([0, 0xFFFF], dtype=torch.int32)
    assert not up(torch.zeros(2), bits).any()
    assert up(torch.ones(2), bits).all()
