"""Teachers that are not the live model: a running average of its weights, or the model as it was before training.

Live targets drift, because student and teacher share their weights; a slow or a fixed teacher does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from remind.alignment.cache import Cache, Entry, Ranks
from remind.alignment.checkpoint import trained_parameters, whole
from remind.alignment.config import TeacherConfig
from remind.alignment.model import head_weight
from remind.alignment.objective import FixedTeacher, HiddenTeacher, TopKTeacher, accumulation_dtype, bucketed
from remind.alignment.step import AlignmentModel, MicroBatch, collate
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError

#: Teachers of one microbatch that replace the live ones, by level; empty if all are live.
Fixed = dict[int, FixedTeacher]
#: Examples per file of base targets: what is computed again after a kill.
_BLOCK = 16


class Teachers(Protocol):
    """Where the teachers of a step come from."""

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        """Teachers of each microbatch; `chosen` are its examples, `batches` the same on the device."""
        ...


class Live:
    """The model at its present weights: nothing to prepare."""

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        return [{} for _ in batches]


def teach(
    model: nn.Module, batch: MicroBatch, levels: tuple[int, ...], prefix_sharing: bool = False
) -> dict[int, Tensor]:
    """Final hidden states of the answer positions under `levels`, without gradient: what a `HiddenTeacher` holds.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        prefix_sharing: compute what x1 and x2 have in common once.

    Returns:
        Level to [N, d], in the precision of the model.
    """
    with torch.no_grad():
        _, trace = model(batch, levels, shared=prefix_sharing, terms=False)
    hidden: dict[int, Tensor] = trace.hidden
    return hidden


@torch.no_grad()
def topk_targets(hidden: Tensor, weight: Tensor, tau: float, k: int = 64, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """The fields of a `TopKTeacher`.

    Args:
        hidden: [N, d]; weight: [V, d] of the head. Logits are float32 (float64 where hidden states are), `chunk`
            positions at a time.
        k: tokens kept per position, at most V.

    Returns:
        indices [N, k] int32, by falling probability; log_probs [N, k + 1] float32 (float64).

    Raises:
        ConfigError: k outside 1 to V.
    """
    if not 1 <= k <= len(weight):
        raise ConfigError(f"top-k of {k}: it must be between 1 and the {len(weight)} tokens of the vocabulary")
    dtype = accumulation_dtype(hidden.dtype)
    head = weight.to(dtype)
    pieces = []
    for piece in hidden.split(chunk):
        scaled = piece.to(dtype) @ head.T / tau
        indices = scaled.topk(k, dim=-1).indices
        pieces.append((indices.int(), bucketed(scaled, F.log_softmax(scaled, dim=-1), indices)))
    indices, log_probs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return indices, log_probs


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
        weights = {name: parameter.clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(_local(self.shadow[name]))
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        _reshard(module)
        with self.swapped():
            weight = head_weight(self.model)
            # the student's own head will do where it never changes
            head = whole(weight).clone() if weight.requires_grad else None
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


class BaseTargets:
    """Targets of the model as it was before training: computed once, kept on disk, read as the steps need them.

    Args:
        module: the model as it is before training, on the device it runs on; its head is kept where it is trained.
        examples: those of the training split, in order.
        levels: those that teach.
        base: fingerprint of the weights.
        frozen_head: whether the head stays as it is; then none is kept.

    Raises:
        ModelError: the cache cannot be written.
    """

    def __init__(
        self,
        module: AlignmentModel,
        examples: Sequence[Example],
        levels: Sequence[int],
        config: TeacherConfig,
        base: str,
        cache: Cache,
        ranks: Ranks,
        frozen_head: bool,
    ) -> None:
        self.levels, self.config = tuple(sorted(levels)), config
        weight = head_weight(module.model).detach()
        self.head = weight.clone() if config.targets == "hidden" and not frozen_head else None
        about: list[Any] = [base, str(weight.dtype), self.levels, config.targets]
        if config.targets == "topk":
            about += [config.k, module.objective.tau]
        blocks = [list(examples[start : start + _BLOCK]) for start in range(0, len(examples), _BLOCK)]
        keys = [[about, self._content(block)] for block in blocks]
        entries = cache.entries("targets", keys, lambda n: self._compute(module, blocks[n]), ranks, "base targets")
        self._rows: dict[int, dict[str, Tensor]] = {}
        for block, (tensors, _) in zip(blocks, entries, strict=True):
            lengths = tensors.pop("lengths").tolist()
            columns = {name: values.split(lengths) for name, values in tensors.items()}
            for place, example in enumerate(block):
                self._rows[id(example)] = {name: rows[place] for name, rows in columns.items()}
        self._examples = examples  # keeps the keys of `_rows` valid

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        return [self._teachers(some, batch.targets.device) for some, batch in zip(chosen, batches, strict=True)]

    def _teachers(self, chosen: list[Example], device: torch.device) -> Fixed:
        def column(name: str) -> Tensor:
            return torch.cat([self._rows[id(example)][name] for example in chosen]).to(device)

        if self.config.targets == "hidden":
            return {level: HiddenTeacher(column(f"hidden{level}"), self.head) for level in self.levels}
        return {level: TopKTeacher(column(f"indices{level}"), column(f"log_probs{level}")) for level in self.levels}

    @torch.no_grad()
    def _compute(self, module: AlignmentModel, block: list[Example]) -> Entry:
        weight = head_weight(module.model)
        rows: dict[str, list[Tensor]] = {}
        for example in block:
            batch = collate([example], [1.0]).to(weight.device)
            for level, h in teach(module, batch, self.levels).items():
                targets = {f"hidden{level}": h}
                if self.config.targets == "topk":
                    indices, log_probs = topk_targets(h, weight, module.objective.tau, self.config.k)
                    targets = {f"indices{level}": indices, f"log_probs{level}": log_probs}
                for name, value in targets.items():
                    rows.setdefault(name, []).append(value.cpu())
        lengths = torch.tensor([len(example.answer) for example in block])
        return {"lengths": lengths, **{name: torch.cat(values) for name, values in rows.items()}}, None

    def _content(self, block: Sequence[Example]) -> str:
        return hashlib.sha256(b"".join(example.content((0, *self.levels)) for example in block)).hexdigest()
