"""Stochastic rounding, with random numbers that are a function of where they are used: a resume needs no state."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

#: Bits a float32 has and a bfloat16 has not; also the bits of one rounding decision.
BITS = 16


def generator_of(device: torch.device, *place: int) -> torch.Generator:
    """A generator that depends on the numbers `place` alone, e.g. (seed, step, parameter)."""
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def random_bits(like: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """`count` (at most 3) tensors of the shape of `like`, int32, uniform over 0 to 2^16 − 1."""
    assert 1 <= count <= 3  # a drawn int64 has 63 random bits
    drawn = torch.empty(like.shape, dtype=torch.int64, device=like.device).random_(generator=generator)
    return [((drawn >> (BITS * k)) & 0xFFFF).to(torch.int32) for k in range(count)]


def to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """float32 to one of the two nearest bfloat16 values, up with the probability that makes the mean exact.

    Args:
        value: float32, any shape.
        bits: of the same shape, from `random_bits`.

    Returns:
        bfloat16; values that are exact in it, infinities and NaN as they are.
    """
    # a bfloat16 is the upper half of a float32: a random lower half carries over with probability lower / 2^16
    rounded = ((value.view(torch.int32) + bits) & -(1 << BITS)).view(torch.float32)
    # the carry would turn some NaN into -0
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def up(fraction: Tensor, bits: Tensor) -> Tensor:
    """Whether to round up, true with probability `fraction` (0 to 1)."""
    return bits < fraction * (1 << BITS)
