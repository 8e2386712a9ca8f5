"""One training step on a few samples: the forward and backward passes over x2, x1 and x0.

Where teachers get no gradient, the terms of Eq. 7 are decoupled and each level can be run back before the next one is
run forward (`sequential`): one graph lives at a time, so that memory is about that of fine-tuning on x0. The `joint`
form runs all levels forward first; it is the reference, and what `target_grad: flow` needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from remind.alignment.chunked import chunked_terms
from remind.alignment.data import Example
from remind.alignment.losses import N_LEVELS, Objective
from remind.errors import ConfigError, ModelError

StepKind = Literal["sequential", "joint"]


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together; B samples, N answer positions in all.

    Attributes:
        input_ids: for each level [B, T_level]: prompt and answer without its last token, padded on the right. Padding
            comes after everything that is read, so a causal model needs no mask for it.
        starts: [3, B], position whose logits predict the first answer token.
        rows: [N], sample of each answer position.
        offsets: [N], its place in the answer.
        targets: [N], the token there.
        lengths: [B], answer lengths L_y.
        weights: [B], weight of each sample in the loss.
    """

    input_ids: tuple[Tensor, ...]
    starts: Tensor
    rows: Tensor
    offsets: Tensor
    targets: Tensor
    lengths: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, input_ids=tuple(ids.to(device) for ids in self.input_ids), **moved)


def collate(examples: Sequence[Example], weights: Sequence[float]) -> MicroBatch:
    """Samples of unequal lengths as one microbatch. The padding token is 0; nothing ever reads it."""
    input_ids = []
    for level in range(N_LEVELS):
        rows = [torch.cat([example.prompts[level], example.answer[:-1]]).long() for example in examples]
        input_ids.append(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    lengths = torch.tensor([len(example.answer) for example in examples])
    starts = [[len(example.prompts[level]) - 1 for example in examples] for level in range(N_LEVELS)]
    return MicroBatch(
        input_ids=tuple(input_ids),
        starts=torch.tensor(starts),
        rows=torch.repeat_interleave(torch.arange(len(examples)), lengths),
        offsets=torch.cat([torch.arange(int(length)) for length in lengths]),
        targets=torch.cat([example.answer for example in examples]).long(),
        lengths=lengths,
        weights=torch.tensor(weights, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Trace:
    """What a pass leaves besides its loss, all detached: final hidden states by level [N, d], values by name [B]."""

    hidden: dict[int, Tensor]
    values: dict[str, Tensor]


def body_of(model: Any) -> Any:
    """The Hugging Face model without its output head; ends in the final norm. Sees through a PEFT wrapper."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = getattr(model, model.base_model_prefix, None)
    if body is None or body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head")
    return body


def head_weight(model: Any) -> Tensor:
    """[V, d] of the output head."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise ModelError(f"the output head of {type(model).__name__} is not a plain matrix: {type(head).__name__}")
    weight: Tensor = head.weight
    return weight


class AlignmentModel(nn.Module):
    """A language model whose forward is a pass of the step: encode levels, then loss and values at answer positions.

    Head and loss are computed inside the forward, so that the hooks of DDP and FSDP2 see the head's weight in use.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def encode(self, batch: MicroBatch, level: int) -> Tensor:
        """Final hidden states of the answer positions under a level, [N, d]."""
        body = body_of(self.model)
        input_ids = batch.input_ids[level]
        # positions are always given: left to itself a model with multimodal RoPE may add offsets of an earlier image
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        extra: dict[str, Any] = {}
        if hasattr(body, "get_rope_index"):
            extra["position_ids"] = positions.expand(3, *positions.shape)
        elif "position_ids" in inspect.signature(body.forward).parameters:
            extra["position_ids"] = positions
        hidden: Tensor = body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        return hidden[batch.rows, batch.starts[level][batch.rows] + batch.offsets]

    def forward(
        self, batch: MicroBatch, levels: tuple[int, ...], teachers: Mapping[int, Tensor] | None = None
    ) -> tuple[Tensor, Trace]:
        """Run `levels`, and sum over samples weight · (mean over positions of the terms in which they learn).

        Args:
            teachers: hidden states [N, d] of levels that ran before.

        Returns:
            The sum; and the trace. Plain values travel in a `Trace`, which wrappers that cast outputs leave alone.
        """
        hidden = dict(teachers or {})
        for level in levels:
            with torch.set_grad_enabled(torch.is_grad_enabled() and level in self.objective.trained):
                hidden[level] = self.encode(batch, level)
        share = (batch.weights / batch.lengths)[batch.rows]
        weight = head_weight(self.model)
        loss, positions = chunked_terms(hidden, weight, batch.targets, share, self.objective, levels)
        values = {
            name: torch.zeros_like(batch.weights).index_add_(0, batch.rows, value.double()) / batch.lengths
            for name, value in positions.items()
        }
        return loss, Trace({level: h.detach() for level, h in hidden.items()}, values)


@dataclass(frozen=True)
class Pass:
    """Levels that go forward together, and whether a backward follows."""

    levels: tuple[int, ...]
    backward: bool


def plan(objective: Objective, step: StepKind = "sequential") -> tuple[Pass, ...]:
    """The passes of a step: each level after its teachers, each run once unless edges form a circle.

    Raises:
        ConfigError: nothing is trained, or teachers that need gradients in sequential passes.
    """
    if not objective.trained:
        raise ConfigError("nothing is trained: no hard level counts and no edge has gamma above 0")
    if step == "joint":
        return (Pass(tuple(sorted(objective.levels)), True),)
    if objective.target_grad == "flow" and objective.active:
        raise ConfigError("target_grad flow needs step joint: sequential passes have freed the teacher's graph")
    passes: list[Pass] = []
    waiting, known = set(objective.levels), set[int]()
    while waiting:
        missing = {
            level: {edge.teacher for edge in objective.edges if edge.student == level} - known
            for level in sorted(waiting, reverse=True)
        }
        level = next((level for level, teachers in missing.items() if not teachers), None)
        if level is None:
            # a circle: one teacher is read at the present weights first
            level = max(next(iter(missing.values())))
            passes.append(Pass((level,), False))
        else:
            passes.append(Pass((level,), level in objective.trained))
            waiting.remove(level)
        known.add(level)
    return tuple(passes)


def run(
    model: nn.Module,
    batch: MicroBatch,
    passes: Sequence[Pass],
    backward: Callable[[Tensor], Any] | None,
    unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext,
    sync: bool = True,
) -> dict[str, Tensor]:
    """Carry out the passes; gradients add up in the parameters.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        backward: called with the loss of each pass that has one; None: no gradients at all (held-out loss).
        unsynced: context in which gradients are not yet exchanged between processes.
        sync: whether the last backward exchanges them.

    Returns:
        Values of each sample by name, [B] float64, averaged over answer positions.
    """
    hidden: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    last = max((index for index, p in enumerate(passes) if p.backward), default=-1)
    for index, step in enumerate(passes):
        learns = backward is not None and step.backward
        with nullcontext() if sync and index == last else unsynced(), torch.set_grad_enabled(learns):
            loss, trace = model(batch, step.levels, hidden)
            if learns and backward is not None:
                backward(loss)
        del loss
        hidden.update(trace.hidden)
        # a level that runs twice to close a circle gives the same values twice
        values.update(trace.values)
    return values
