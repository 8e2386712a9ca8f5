"""Teachers that are not the live model: a running average of its weights, or the model as it was before training.

Live targets drift, because student and teacher share their weights; a slow or a fixed teacher does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from remind.alignment.batch import MicroBatch
from remind.alignment.checkpoint import trained_parameters
from remind.alignment.example import Example
from remind.alignment.fixed import FixedTeacher, HiddenTeacher, teach
from remind.alignment.step import head_weight
from remind.core.errors import ConfigError

#: What stands for the live teachers of one microbatch: level to teacher; empty where they are live.
Fixed = dict[int, FixedTeacher]


@dataclass(frozen=True)
class TeacherConfig:
    """Teachers with other weights than the present ones (objective.teacher_weights)."""

    ema_decay: float = 0.98
    """ema: share of the running average that stays at each step."""
    targets: Literal["hidden", "topk"] = "hidden"
    """base: what is kept on disk. hidden: final hidden states of the answer, exact (an answer token takes as much as
    the model is wide). topk: log-probabilities of the likeliest tokens, and of all others together."""
    k: int = 64
    """topk: tokens kept per position."""

    def __post_init__(self) -> None:
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay is {self.ema_decay}; it must lie in [0, 1)")
        if self.targets not in ("hidden", "topk"):
            raise ConfigError(f"teacher.targets is {self.targets!r}; it is hidden or topk")
        if self.k < 1:
            raise ConfigError(f"teacher.k is {self.k}; it must be 1 or more")


class Teachers(Protocol):
    """Where the teachers of a step come from."""

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        """Teachers of each microbatch; `chosen` are its examples, `batches` the same on the device."""
        ...


class Live:
    """The model at its present weights: nothing to prepare."""

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        return [{} for _ in batches]


class Ema:
    """A running average, in float32, of the parameters that are trained; it begins with their first values.

    Args:
        model: the language model, as it is trained (sharded, where it is).
        levels: those that teach.
        prefix_sharing: compute what x1 and x2 have in common once.
    """

    def __init__(self, model: nn.Module, decay: float, levels: Sequence[int], prefix_sharing: bool = False) -> None:
        self.model, self.decay, self.levels = model, decay, tuple(levels)
        self.prefix_sharing = prefix_sharing
        self.shadow: dict[str, Tensor] = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in trained_parameters(model).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """After an optimiser step: average ← decay · average + (1 − decay) · weights."""
        for name, parameter in trained_parameters(self.model).items():
            average = _local(self.shadow[name])
            average.lerp_(_local(parameter).to(average.dtype), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the average in place of its weights, which come back bit by bit."""
        parameters = {name: _local(parameter) for name, parameter in trained_parameters(self.model).items()}
        with torch.no_grad():
            kept = {name: parameter.clone() for name, parameter in parameters.items()}
            self._put({name: _local(average) for name, average in self.shadow.items()}, parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                self._put(kept, parameters)

    def _put(self, values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(values[name])

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        _reshard(module)
        with self.swapped():
            weight = head_weight(self.model)
            # the student's own head will do where it never changes
            head = _whole(weight).clone() if weight.requires_grad else None
            hidden = [teach(module, batch, self.levels, self.prefix_sharing) for batch in batches]
            # FSDP may still hold whole weights, and would go on with them
            _reshard(module)
        return [{level: HiddenTeacher(h, head) for level, h in levels.items()} for levels in hidden]


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _local(value: Tensor) -> Tensor:
    """The part of a tensor that this process holds; writing to it writes to the tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
