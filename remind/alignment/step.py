"""One training step on a few samples: the forward and backward passes over x2, x1 and x0.

Where teachers get no gradient, the terms of Eq. 7 are decoupled and each level can be run back before the next one is
run forward (`sequential`): one graph lives at a time, so that memory is about that of fine-tuning on x0. The `joint`
form runs all levels forward first; it is the reference, and what `target_grad: flow` needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from remind.alignment.batch import MicroBatch, collate
from remind.alignment.chunked import chunked_terms
from remind.alignment.fixed import FixedTeacher
from remind.alignment.objective import Objective
from remind.alignment.prefix import rest_of, shared_attention
from remind.core.errors import ConfigError, ModelError

__all__ = [
    "AlignmentModel",
    "MicroBatch",
    "Pass",
    "StepKind",
    "Trace",
    "body_of",
    "collate",
    "head_weight",
    "plan",
    "run",
]

StepKind = Literal["sequential", "joint"]


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
    # PEFT wraps a tied head of which it trains single rows; `weight` of the wrapper has them in it
    plain = head.original_module if hasattr(head, "token_adapter") else head
    if type(plain) is not nn.Linear or plain.bias is not None:
        raise ModelError(f"the output head of {type(model).__name__} is not a plain matrix: {type(head).__name__}")
    weight: Tensor = head.weight
    return weight


def _decoder(model: Any) -> Any:
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.get_decoder()


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
        ids = batch.input_ids[level]
        hidden = self._run(ids, self._positions(batch, level), batch.pixels)
        return hidden[batch.rows, batch.starts[level][batch.rows] + batch.offsets]

    def encode_shared(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Final hidden states under x1 and x2, [N, d] each; what they have in common runs once, and x2 has no graph."""
        positions = self._positions(batch, 2)
        with shared_attention(_decoder(self.model), batch.common) as prefix:
            one = self.encode(batch, 1)
            with torch.no_grad():
                lengths = batch.starts[2] + batch.lengths
                ids, positions = rest_of(batch.input_ids[2], lengths, batch.common, positions)
                prefix.expect(ids.shape[1])
                rest = self._run(ids, positions, {})
        return one, rest[batch.rows, (batch.starts[2] - batch.common)[batch.rows] + batch.offsets]

    def _run(self, ids: Tensor, positions: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
        """[B, T, d] final hidden states."""
        body = body_of(self.model)
        extra: dict[str, Any] = dict(pixels)
        if hasattr(body, "get_rope_index") or "position_ids" in inspect.signature(body.forward).parameters:
            extra["position_ids"] = positions
        hidden: Tensor = body(input_ids=ids, use_cache=False, **extra).last_hidden_state
        return hidden

    def _positions(self, batch: MicroBatch, level: int) -> Tensor:
        """[B, T], or [3, B, T] for multimodal RoPE.

        They are always given: left to itself a model with multimodal RoPE may add offsets of an earlier image.
        """
        ids, body = batch.input_ids[level], body_of(self.model)
        if not hasattr(body, "get_rope_index"):
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if not batch.pixels:
            return torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        arguments: dict[str, Any] = {"input_ids": ids, "image_grid_thw": batch.pixels["image_grid_thw"]}
        if "mm_token_type_ids" in inspect.signature(body.get_rope_index).parameters:
            arguments["mm_token_type_ids"] = (ids == body.config.image_token_id).int()
        positions: Tensor = body.get_rope_index(**arguments)[0]
        return positions

    def _shares(self, batch: MicroBatch) -> bool:
        """Whether all images stand in what x1 and x2 have in common."""
        if not batch.pixels:
            return True
        ids = batch.input_ids[2]
        after = torch.arange(ids.shape[1], device=ids.device) >= batch.common[:, None]
        return not bool((after & (ids == body_of(self.model).config.image_token_id)).any())

    def forward(
        self,
        batch: MicroBatch,
        levels: tuple[int, ...],
        teachers: Mapping[int, Tensor] | None = None,
        fixed: Mapping[int, FixedTeacher] | None = None,
        shared: bool = False,
        terms: bool = True,
    ) -> tuple[Tensor, Trace]:
        """Run `levels`, and sum over samples weight · (mean over positions of the terms in which they learn).

        Args:
            teachers: hidden states [N, d] of levels that ran before.
            fixed: teachers that stand for a level wherever it teaches (`teacher_weights` base and ema).
            shared: compute what x1 and x2 have in common once; x2 then gets no gradient.
            terms: False: only the hidden states are wanted; the sum is 0 and there are no values.

        Returns:
            The sum; and the trace. Plain values travel in a `Trace`, which wrappers that cast outputs leave alone.
        """
        hidden = dict(teachers or {})
        self._check_teachers(levels, fixed or {}, terms)
        both = shared and {1, 2} <= set(levels) and self._shares(batch)
        if both:
            with torch.set_grad_enabled(torch.is_grad_enabled() and 1 in self.objective.trained):
                hidden[1], hidden[2] = self.encode_shared(batch)
        for level in levels:
            if both and level > 0:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and level in self.objective.trained):
                hidden[level] = self.encode(batch, level)
        if not terms:
            return torch.zeros((), device=batch.targets.device), Trace({k: hidden[k].detach() for k in levels}, {})
        share = (batch.weights / batch.lengths)[batch.rows]
        weight = head_weight(self.model)
        labelled = batch.labelled[batch.rows]
        loss, positions = chunked_terms(hidden, weight, batch.targets, share, self.objective, levels, fixed, labelled)
        values = {
            name: torch.zeros_like(batch.weights).index_add_(0, batch.rows, value.double()) / batch.lengths
            for name, value in positions.items()
        }
        return loss, Trace({level: h.detach() for level, h in hidden.items()}, values)

    def _check_teachers(self, levels: tuple[int, ...], fixed: Mapping[int, FixedTeacher], terms: bool) -> None:
        if not (terms and torch.is_grad_enabled()):
            return
        taught = {edge.teacher for edge in self.objective.edges if edge.student in levels} & self.objective.taught
        if missing := sorted(taught - fixed.keys()):
            raise ConfigError(
                f"teacher_weights {self.objective.teacher_weights}: no teacher was given for level {missing[0]}"
            )


@dataclass(frozen=True)
class Pass:
    """Levels that go forward together, whether a backward follows, and whether x1 and x2 share their prefix."""

    levels: tuple[int, ...]
    backward: bool
    shared: bool = False


def plan(objective: Objective, step: StepKind = "sequential", prefix_sharing: bool = False) -> tuple[Pass, ...]:
    """The passes of a step: each level after its teachers, each run once unless edges form a circle.

    Levels that only teach, and do so with other weights (`teacher_weights` base or ema), are not run.

    Args:
        prefix_sharing: compute what x1 and x2 have in common once. Where x2 needs gradients itself (a hard loss, an
            edge in which it learns, target_grad flow), or x1 has to wait for another level, nothing is shared.

    Raises:
        ConfigError: nothing is trained, or teachers that need gradients in sequential passes.
    """
    if not objective.trained:
        raise ConfigError("nothing is trained: no hard level counts and no edge has gamma above 0")
    if step == "joint":
        together = prefix_sharing and {1, 2} <= objective.levels and 2 not in objective.trained
        return (Pass(tuple(sorted(objective.levels)), True, together),)
    if objective.target_grad == "flow" and objective.active:
        raise ConfigError("target_grad flow needs step joint: sequential passes have freed the teacher's graph")
    passes: list[Pass] = []
    waiting, known = set(objective.levels), set[int]()
    while waiting:
        missing = {
            level: {edge.teacher for edge in objective.edges if edge.student == level} - known - objective.taught
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
    return tuple(_merged(passes) if prefix_sharing else passes)


def _merged(passes: Sequence[Pass]) -> list[Pass]:
    """With x2 and the x1 that follows it in one pass."""
    merged: list[Pass] = []
    for step in passes:
        if merged and step.levels == (1,) and merged[-1] == Pass((2,), False):
            merged[-1] = Pass((1, 2), step.backward, shared=True)
        else:
            merged.append(step)
    return merged


def run(
    model: nn.Module,
    batch: MicroBatch,
    passes: Sequence[Pass],
    backward: Callable[[Tensor], Any] | None,
    unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext,
    sync: bool = True,
    fixed: Mapping[int, FixedTeacher] | None = None,
) -> dict[str, Tensor]:
    """Carry out the passes; gradients add up in the parameters.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        backward: called with the loss of each pass that has one; None: no gradients at all (held-out loss).
        unsynced: context in which gradients are not yet exchanged between processes.
        sync: whether the last backward exchanges them.
        fixed: teachers by level that stand for the live ones; every level that teaches needs one if `teacher_weights`
            is base or ema and the level does not run.

    Returns:
        Values of each sample by name, [B] float64, averaged over answer positions.
    """
    hidden: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    last = max((index for index, p in enumerate(passes) if p.backward), default=-1)
    for index, step in enumerate(passes):
        learns = backward is not None and step.backward
        with nullcontext() if sync and index == last else unsynced(), torch.set_grad_enabled(learns):
            loss, trace = model(batch, step.levels, hidden, fixed, step.shared)
            if learns and backward is not None:
                backward(loss)
        del loss
        hidden.update(trace.hidden)
        # a level that runs twice to close a circle gives the same values twice
        values.update(trace.values)
    return values
