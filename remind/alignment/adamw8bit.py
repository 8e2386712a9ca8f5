"""AdamW with moments of 8 bits, for bfloat16 weights that are rounded stochastically.

Of the libraries, bitsandbytes' optimiser takes no sharded parameters and rounds to the nearest, so that bfloat16
weights of 0.02 do not move at a rate of 1e-5. torchao's rounds stochastically, but its second moments round to 0 where
gradients in a block differ by orders: on noisy gradients its weights end 11.8 times their own movement away from those
of AdamW in float64 (bitsandbytes 0.23, this one 0.07; torchao 0.18.0, bitsandbytes 0.50.2). It also needs a compiler
at run time, and its blocks depend on how a parameter is sharded. Here blocks lie inside the rows of a parameter, which
FSDP2 never cuts, so that a checkpoint fits any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as distributed_zeros

from remind.core.errors import ConfigError

#: Bits a float32 has and a bfloat16 has not; also the bits of one rounding decision.
BITS = 16
#: Values of a row that share one scale.
BLOCK = 256
#: Numbers updated at a time on a CPU, where they should fit its cache, and elsewhere; each takes some 60 bytes then.
_CHUNK, _CHUNK_GPU = 1 << 18, 1 << 24
#: Powers of two that the codes span below the largest value of a block.
_OCTAVES = {torch.int8: 14.0, torch.uint8: 24.0}


@lru_cache
def _magnitudes(kind: torch.dtype, device: torch.device) -> Tensor:
    """What codes stand for, as shares of the largest value in a block: 0, then a geometric series that ends at 1."""
    top = torch.iinfo(kind).max
    codes = torch.arange(top + 1, dtype=torch.float64)
    series = torch.exp2((codes - top) * (_OCTAVES[kind] / (top - 1)))
    return torch.where(codes == 0, 0.0, series).float().to(device)


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes [n, m] int8 (signed values) or uint8 (values ≥ 0) and scales [n, ⌈m / 256⌉] to float32 [n, m]."""
    table = _magnitudes(codes.dtype, codes.device)
    shares = table[codes.int().abs()]
    if codes.dtype == torch.int8:
        shares = shares * codes.sign()
    return shares * _spread(scale, codes.shape[1])


def quantise(value: Tensor, codes: Tensor, scale: Tensor, bits: Tensor) -> None:
    """Write `value` [n, m] float32 into `codes` and `scale` (shapes as in `dequantise`), in place.

    Codes are logarithmic and rounded stochastically, so that the mean is exact: a decay of 0.1 % a step is far less
    than the distance of two codes, and with the nearest code a moment would never move. Values ≥ 0 stay above 0: a
    second moment of 0 beside a first moment that is not would give a step without bound.

    Args:
        bits: [n, m] from `random_bits`.
    """
    kind, (n, m) = codes.dtype, value.shape
    top, signed = torch.iinfo(kind).max, kind == torch.int8
    table = _magnitudes(kind, value.device)
    size = value.abs()
    padded = torch.nn.functional.pad(size, (0, -m % BLOCK)) if m > BLOCK and m % BLOCK else size
    largest = padded.view(n, -1, min(BLOCK, m)).amax(-1)
    share = size / _spread(largest, m).clamp_min(torch.finfo(torch.float32).tiny)
    if not signed:
        share = torch.where(size > 0, share.clamp_min(table[1]), share)
    below = (share.log2() * ((top - 1) / _OCTAVES[kind]) + top).floor().clamp(0, top - 1).int()
    low, high = table[below], table[below + 1]
    chosen = below + up(((share - low) / (high - low)).clamp(0, 1), bits)
    codes.copy_(chosen * value.sign().int() if signed else chosen)
    scale.copy_(largest)


def _spread(scale: Tensor, m: int) -> Tensor:
    """[n, blocks] to [n, m]."""
    return scale.expand(-1, m) if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :m]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (decoupled decay) in float32 arithmetic, with two bytes of state per weight.

    Moments of parameters with two or more dimensions are kept as codes of 8 bits with a scale per 256 values of a row;
    others, which are few, in float32. bfloat16 parameters are rounded stochastically: rounded to the nearest, weights
    of size 0.02 would not move at all at a learning rate of 1e-5. Each random number is a function of seed, step,
    number of the parameter and shard, so that equal runs are equal to the bit and a resume needs nothing but the state.

    Args:
        params: parameters or groups; plain, or sharded along their first dimension (FSDP2).
        seed: of the stochastic rounding.

    Raises:
        ConfigError: a parameter that is sharded otherwise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, number)
                number += 1
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            state |= _fresh(parameter)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        # the step's size and decay in double precision, as torch has them
        size = group["lr"] / (1 - beta1**step)
        correction = (1 - beta2**step) ** 0.5
        generator = generator_of(_local(parameter).device, self.seed, step, number, *_shard(parameter))
        for weight, grad, codes in _chunks(parameter, state):
            bits = random_bits(weight, 3, generator)
            first, second = _moments(codes)
            exact = torch.promote_types(weight.dtype, torch.float32)
            grad = grad.to(exact)
            first = first.lerp(grad.to(first.dtype), 1 - beta1)
            second = second.lerp(grad.square().to(second.dtype), 1 - beta2)
            value = weight.to(exact) * (1 - group["lr"] * group["weight_decay"])
            value.addcdiv_(first.to(exact), (second.sqrt() / correction).add_(group["eps"]).to(exact), value=-size)
            weight.copy_(to_bfloat16(value, bits[2]) if weight.dtype == torch.bfloat16 else value)
            _keep(codes, first, second, bits)


def _moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if "exp_avg_scale" in state:
        return dequantise(first, state["exp_avg_scale"]), dequantise(second, state["exp_avg_sq_scale"])
    return first, second


def _keep(state: dict[str, Tensor], first: Tensor, second: Tensor, bits: list[Tensor]) -> None:
    for name, value, own in (("exp_avg", first, bits[0]), ("exp_avg_sq", second, bits[1])):
        if f"{name}_scale" in state:
            quantise(value, state[name], state[f"{name}_scale"], own)
        else:
            state[name].copy_(value)


def _fresh(parameter: Tensor) -> dict[str, Tensor]:
    """State before the first step, sharded as the parameter is."""
    shape = tuple(parameter.shape)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.ndim < 2:
        return state | {name: _zeros(parameter, shape, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    blocks = -(-parameter.shape[1:].numel() // BLOCK)
    for name, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[name] = _zeros(parameter, shape, kind)
        state[f"{name}_scale"] = _zeros(parameter, (shape[0], blocks), torch.float32)
    return state


def _zeros(parameter: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=kind, device=parameter.device)
    for placement in parameter.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            raise ConfigError("adamw8bit: parameters must be sharded along their first dimension, as FSDP2 does it")
    mesh, placements = parameter.device_mesh, parameter.placements
    return distributed_zeros(shape, dtype=kind, device_mesh=mesh, placements=placements)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _shard(parameter: Tensor) -> tuple[int, ...]:
    """Where this process's shard lies; equal for processes that hold the same one."""
    if not isinstance(parameter, DTensor):
        return ()
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return tuple(at for at, placement in zip(place, parameter.placements, strict=True) if placement.is_shard())


def _chunks(parameter: Tensor, state: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Views of weight, gradient and moments over some rows at a time, two-dimensional; [1, n] for vectors."""
    assert parameter.grad is not None
    weight, grad = _local(parameter.detach()), _local(parameter.grad)
    moments = {name: _local(value) for name, value in state.items() if name != "step"}
    n = 1 if weight.ndim < 2 else weight.shape[0]
    if not weight.numel():
        return
    weight, grad = weight.view(n, -1), grad.reshape(n, -1)
    moments = {name: value.view(n, -1) for name, value in moments.items()}
    most = _CHUNK if weight.device.type == "cpu" else _CHUNK_GPU
    rows = max(1, most // weight.shape[1])
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        yield weight[part], grad[part], {name: value[part] for name, value in moments.items()}


# stochastic rounding


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
