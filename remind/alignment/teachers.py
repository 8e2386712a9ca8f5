"""Teachers that are not the live model: a running average of its weights, or the model as it was before training.

Live targets drift, because student and teacher share their weights; a slow or a fixed teacher does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from remind.alignment.answers import Entry, shared_entries
from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.objective import FixedTeacher, Head, HiddenTeacher, TopKTeacher, accumulation_dtype, bucketed
from remind.alignment.step import AlignmentModel, MicroBatch, collate, head_of
from remind.core.cache import Cache
from remind.core.errors import ConfigError
from remind.core.files import write_tensors

#: Examples per file of base targets: what is computed again after a kill.
_BLOCK = 16


class Teachers(Protocol):
    """Teachers with other weights than those of the model that learns."""

    def of(self, module: nn.Module, batch: MicroBatch) -> Mapping[int, FixedTeacher]:
        """Those of a microbatch, by level."""
        ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(value: Tensor) -> Tensor:
    """The full tensor, detached; gathers the shards of FSDP2 (every process must call it)."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


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
def topk_targets(hidden: Tensor, head: Head, tau: float, k: int = 64, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """The fields of a `TopKTeacher`.

    Args:
        hidden: [N, d]. head: its logits are float32 (float64 where hidden states are), `chunk` positions at a time.
        k: tokens kept per position, at most V.

    Returns:
        indices [N, k] int32, by falling probability; log_probs [N, k + 1] float32 (float64).

    Raises:
        ConfigError: k outside 1 to V.
    """
    if not 1 <= k <= len(head.weight):
        raise ConfigError(f"top-k of {k}: it must be between 1 and the {len(head.weight)} tokens of the vocabulary")
    dtype = accumulation_dtype(hidden.dtype)
    head = head.wide(dtype)
    pieces = []
    for piece in hidden.split(chunk):
        scaled = head.logits(piece) / tau
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

    def of(self, module: nn.Module, batch: MicroBatch) -> Mapping[int, FixedTeacher]:
        _reshard(module)
        with self.swapped():
            # the student's own head will do where it never changes
            head = _kept(head_of(self.model))
            hidden = teach(module, batch, self.levels, self.prefix_sharing)
            # FSDP may still hold whole weights, and would go on with them
            _reshard(module)
        return {level: HiddenTeacher(states, head) for level, states in hidden.items()}

    def save(self, path: Path, writes: bool) -> None:
        """Write the averages; every process calls it, since shards are gathered."""
        full = {name: whole(value).cpu().contiguous() for name, value in self.shadow.items()}
        if writes:
            write_tensors(path, full)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        for name, value in load_file(path).items():
            shadow = self.shadow[name]
            value = value.to(shadow.device)
            if isinstance(shadow, DTensor):
                value = distribute_tensor(value, shadow.device_mesh, shadow.placements)
            shadow.copy_(value)


def _kept(head: Head) -> Head | None:
    """A copy of a head that is trained; None: the student's own will do."""
    if not head.trained:
        return None
    bias = None if head.bias is None else whole(head.bias).clone()
    return head._replace(weight=whole(head.weight).clone(), bias=bias)


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
        base: fingerprint of the weights.

    Raises:
        OSError: the cache cannot be written.
    """

    def __init__(
        self, module: AlignmentModel, examples: Sequence[Example], base: str, cache: Cache, accelerator: Any
    ) -> None:
        self.objective: Objective = module.objective
        self.levels = tuple(sorted(self.objective.taught))
        head = head_of(module.model)
        hidden = self.objective.base_targets == "hidden"
        self.head = _kept(head) if hidden else None
        about: list[Any] = [base, str(head.weight.dtype), self.levels, self.objective.base_targets]
        if not hidden:
            about += [self.objective.topk, self.objective.tau]
        blocks = [list(examples[start : start + _BLOCK]) for start in range(0, len(examples), _BLOCK)]
        keys = [[about, self._content(block)] for block in blocks]
        entries = shared_entries(
            cache, "targets", keys, lambda n: self._compute(module, blocks[n]), accelerator, "base targets"
        )
        self._rows: dict[str, dict[str, Tensor]] = {}
        for block, (tensors, _) in zip(blocks, entries, strict=True):
            lengths = tensors.pop("lengths").tolist()
            columns = {name: values.split(lengths) for name, values in tensors.items()}
            for place, example in enumerate(block):
                self._rows[example.id] = {name: rows[place] for name, rows in columns.items()}

    def of(self, module: nn.Module, batch: MicroBatch) -> Mapping[int, FixedTeacher]:
        def column(name: str) -> Tensor:
            rows = [self._rows[example.id][name] for example in batch.examples]
            return torch.cat(rows).to(batch.targets.device)

        if self.objective.base_targets == "hidden":
            return {level: HiddenTeacher(column(f"hidden{level}"), self.head) for level in self.levels}
        return {level: TopKTeacher(column(f"indices{level}"), column(f"log_probs{level}")) for level in self.levels}

    @torch.no_grad()
    def _compute(self, module: AlignmentModel, block: list[Example]) -> Entry:
        head = head_of(module.model)
        rows: dict[str, list[Tensor]] = {}
        for example in block:
            batch = collate([(example, 1.0)]).to(head.weight.device)
            for level, h in teach(module, batch, self.levels).items():
                targets = {f"hidden{level}": h}
                if self.objective.base_targets == "topk":
                    indices, log_probs = topk_targets(h, head, self.objective.tau, self.objective.topk)
                    targets = {f"indices{level}": indices, f"log_probs{level}": log_probs}
                for name, value in targets.items():
                    rows.setdefault(name, []).append(value.cpu())
        lengths = torch.tensor([len(example.answer) for example in block])
        return {"lengths": lengths, **{name: torch.cat(values) for name, values in rows.items()}}, None

    def _content(self, block: Sequence[Example]) -> str:
        return hashlib.sha256(b"".join(example.content((0, *self.levels)) for example in block)).hexdigest()
