"""One training step on a few samples: the forward and backward passes over x2, x1 and x0.

Where teachers get no gradient, the terms of Eq. 7 are decoupled and each level is run back before the next one is run
forward: one graph lives at a time, so that memory is about that of fine-tuning on x0. With `target_grad: flow` all
levels are run forward first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment.config import N_LEVELS, Objective
from remind.alignment.examples import Example, pixels_of
from remind.alignment.objective import FixedTeacher, Head, chunked_terms
from remind.alignment.prefix import rest_of, shared_attention
from remind.core.errors import ConfigError, ModelError
from remind.models.backbone import inner_model


@dataclass(frozen=True)
class MicroBatch:
    """B samples, N answer positions in all.

    Attributes:
        input_ids: for each level [B, T_level]: prompt and answer without its last token, padded on the right. Padding
            comes after everything that is read, so a causal model needs no mask for it.
        starts: [3, B], position whose logits predict the first answer token.
        rows: [N], sample of each answer position.
        offsets: [N], its place in the answer.
        targets: [N], the token there.
        lengths: [B], answer lengths L_y.
        weights: [B], weight of each sample in the loss.
        labelled: [B] bool, whether the answer is gold: without one there is no hard loss.
        common: [B], tokens that the prompts under x1 and x2 begin with alike; at least one of each is left out.
        examples: the samples themselves.
        graded: gold answers of samples whose edges teach at another answer; only hard losses count there.
        pixels: pixel_values [patches, values] and image_grid_thw [images, 3] of the images of all samples in order;
            empty without images. The levels of a question show the same ones.
    """

    input_ids: tuple[Tensor, ...]
    starts: Tensor
    rows: Tensor
    offsets: Tensor
    targets: Tensor
    lengths: Tensor
    weights: Tensor
    labelled: Tensor
    common: Tensor
    examples: tuple[Example, ...]
    graded: MicroBatch | None = None
    pixels: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def own(self) -> list[Example]:
        """Those that count: others stand in where a process has none."""
        return [example for example, weight in zip(self.examples, self.weights.tolist(), strict=True) if weight > 0]

    def to(self, device: torch.device | str) -> MicroBatch:
        moved: dict[str, Any] = {k: value.to(device) for k, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(
            self,
            input_ids=tuple(ids.to(device) for ids in self.input_ids),
            pixels={name: value.to(device) for name, value in self.pixels.items()},
            graded=None if self.graded is None else self.graded.to(device),
            **moved,
        )


def collate(samples: Sequence[tuple[Example, float]], always_graded: bool = False) -> MicroBatch:
    """Samples of unequal lengths, each with its weight in the loss. The padding token is 0; nothing ever reads it.

    Args:
        always_graded: even where no sample has two answers, so that all processes run as many passes.
    """
    examples, weights = zip(*samples, strict=True)
    input_ids = []
    for level in range(N_LEVELS):
        rows = [torch.cat([example.prompts[level], example.answer[:-1]]).long() for example in examples]
        input_ids.append(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    lengths = torch.tensor([len(example.answer) for example in examples])
    starts = [[len(example.prompts[level]) - 1 for example in examples] for level in range(N_LEVELS)]
    graded = [(gold, weight) for example, weight in samples if (gold := example.with_gold) is not None]
    if always_graded and not graded:
        graded = [(examples[0], 0.0)]
    return MicroBatch(
        input_ids=tuple(input_ids),
        starts=torch.tensor(starts),
        rows=torch.repeat_interleave(torch.arange(len(examples)), lengths),
        offsets=torch.cat([torch.arange(int(length)) for length in lengths]),
        targets=torch.cat([example.answer for example in examples]).long(),
        lengths=lengths,
        weights=torch.tensor(weights, dtype=torch.float64),
        labelled=torch.tensor([example.labelled for example in examples]),
        common=torch.tensor([common_prefix(example.prompts[1], example.prompts[2]) for example in examples]),
        examples=examples,
        graded=collate(graded) if graded else None,
        pixels=pixels_of(examples),
    )


def common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two prompts [n], [m] begin with alike, short of the last token of either.

    The last token of a prompt predicts the first of the answer, so each prompt must run at least that one by itself.
    """
    most = max(min(len(one), len(other)) - 1, 0)
    differ = (one[:most] != other[:most]).nonzero()
    return int(differ[0]) if len(differ) else most


@dataclass(frozen=True)
class Trace:
    """What a pass leaves besides its loss, all detached: final hidden states by level [N, d], values by name [B]."""

    hidden: dict[int, Tensor]
    values: dict[str, Tensor]


def body_of(model: Any) -> Any:
    """The Hugging Face model without its output head; ends in the final norm. Sees through a PEFT wrapper."""
    model = inner_model(model)
    body = getattr(model, model.base_model_prefix, None)
    if body is None or body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head")
    return body


def head_of(model: Any) -> Head:
    """The output head, with what the model does to its logits besides."""
    return _head_of(inner_model(model))


def _head_of(model: Any) -> Head:
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    # PEFT wraps a tied head of which it trains single rows; `weight` of the wrapper has them in it
    plain = head.original_module if hasattr(head, "token_adapter") else head
    if type(plain) is not nn.Linear:
        raise ModelError(f"the output head of {type(model).__name__} is not a plain matrix: {type(head).__name__}")
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return Head(head.weight, plain.bias, scale, getattr(config, "final_logit_softcapping", None))


class AlignmentModel(nn.Module):
    """A language model whose forward is a pass of the step: encode levels, then loss and values at answer positions.

    Head and loss are computed inside the forward, so that the hooks of DDP and FSDP2 see the head's weight in use.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective, self.hard_only = objective, replace(objective, edges=())
        inner: Any = inner_model(model)
        # in a tuple: these are parts of the model, not more modules
        self._parts = (body_of(model), inner.get_decoder(), inner)
        # what accelerate wraps as a unit under FSDP
        self._no_split_modules = getattr(inner, "_no_split_modules", None)

    def encode(self, batch: MicroBatch, level: int) -> Tensor:
        """Final hidden states of the answer positions under a level, [N, d]."""
        ids = batch.input_ids[level]
        hidden = self._run(ids, self._positions(batch, level), batch.pixels)
        return hidden[batch.rows, batch.starts[level][batch.rows] + batch.offsets]

    def encode_shared(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Final hidden states under x1 and x2, [N, d] each; what they have in common runs once, and x2 has no graph."""
        positions = self._positions(batch, 2)
        with shared_attention(self._parts[1], batch.common) as prefix:
            one = self.encode(batch, 1)
            with torch.no_grad():
                lengths = batch.starts[2] + batch.lengths
                ids, positions = rest_of(batch.input_ids[2], lengths, batch.common, positions)
                prefix.expect(ids.shape[1])
                rest = self._run(ids, positions, {})
        return one, rest[batch.rows, (batch.starts[2] - batch.common)[batch.rows] + batch.offsets]

    def _run(self, ids: Tensor, positions: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
        """[B, T, d] final hidden states."""
        body = self._parts[0]
        extra: dict[str, Any] = dict(pixels)
        if hasattr(body, "get_rope_index") or "position_ids" in inspect.signature(body.forward).parameters:
            extra["position_ids"] = positions
        hidden: Tensor = body(input_ids=ids, use_cache=False, **extra).last_hidden_state
        return hidden

    def _positions(self, batch: MicroBatch, level: int) -> Tensor:
        """[B, T], or [3, B, T] for multimodal RoPE.

        They are always given: left to itself a model with multimodal RoPE may add offsets of an earlier image.
        """
        ids, body = batch.input_ids[level], self._parts[0]
        places = torch.arange(ids.shape[1], device=ids.device)
        if not hasattr(body, "get_rope_index"):
            return places.expand_as(ids)
        if not batch.pixels:
            return places.expand(3, *ids.shape)
        arguments: dict[str, Any] = {"input_ids": ids, "image_grid_thw": batch.pixels["image_grid_thw"]}
        if "mm_token_type_ids" in inspect.signature(body.get_rope_index).parameters:
            arguments["mm_token_type_ids"] = (ids == body.config.image_token_id).int()
        positions: Tensor = body.get_rope_index(**arguments)[0]
        return positions

    def _shares(self, batch: MicroBatch) -> bool:
        """Whether all images are in the common prefix of x1 and x2."""
        if not batch.pixels:
            return True
        ids = batch.input_ids[2]
        after = torch.arange(ids.shape[1], device=ids.device) >= batch.common[:, None]
        return not bool((after & (ids == self._parts[0].config.image_token_id)).any())

    def forward(
        self,
        batch: MicroBatch,
        levels: tuple[int, ...],
        teachers: Mapping[int, Tensor] | None = None,
        fixed: Mapping[int, FixedTeacher] | None = None,
        shared: bool = False,
        terms: bool = True,
        hard_only: bool = False,
    ) -> tuple[Tensor, Trace]:
        """Run `levels`, and sum over samples weight · (mean over positions of the terms in which they learn).

        Args:
            teachers: hidden states [N, d] of levels that ran before.
            fixed: teachers that replace a level wherever it teaches (`teacher_model_kind` base and ema).
            shared: compute what x1 and x2 have in common once; x2 then gets no gradient.
            terms: False: only the hidden states are wanted; the sum is 0 and there are no values.
            hard_only: edges do not count.

        Returns:
            The sum; and the trace. Plain values travel in a `Trace`, which wrappers that cast outputs leave alone.
        """
        hidden = dict(teachers or {})
        objective = self.hard_only if hard_only else self.objective
        if terms and torch.is_grad_enabled() and not hard_only:
            self._check_teachers(levels, fixed or {})
        both = shared and {1, 2} <= set(levels) and self._shares(batch)
        if both:
            with torch.set_grad_enabled(torch.is_grad_enabled() and 1 in objective.trained):
                hidden[1], hidden[2] = self.encode_shared(batch)
        for level in levels:
            if both and level > 0:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and level in objective.trained):
                hidden[level] = self.encode(batch, level)
        if not terms:
            return torch.zeros((), device=batch.targets.device), Trace({k: hidden[k].detach() for k in levels}, {})
        share = (batch.weights / batch.lengths)[batch.rows]
        labelled = batch.labelled[batch.rows]
        loss, positions = chunked_terms(
            hidden, _head_of(self._parts[2]), batch.targets, share, objective, levels, fixed, labelled
        )
        values = {
            name: torch.zeros_like(batch.weights).index_add_(0, batch.rows, value.double()) / batch.lengths
            for name, value in positions.items()
        }
        return loss, Trace({level: h.detach() for level, h in hidden.items()}, values)

    def _check_teachers(self, levels: tuple[int, ...], fixed: Mapping[int, FixedTeacher]) -> None:
        taught = {edge.teacher for edge in self.objective.edges if edge.student in levels} & self.objective.taught
        if missing := sorted(taught - fixed.keys()):
            raise ConfigError(
                f"teacher_model_kind {self.objective.teacher_model_kind}: no teacher was given for level {missing[0]}"
            )


@dataclass(frozen=True)
class Pass:
    """Levels that go forward together, whether a backward follows, and whether x1 and x2 share their prefix."""

    levels: tuple[int, ...]
    backward: bool
    shared: bool = False


def plan(objective: Objective, prefix_sharing: bool = False, together: bool | None = None) -> tuple[Pass, ...]:
    """The passes of a step: each level after its teachers, each run once unless edges form a cycle.

    Levels that only teach, and do so with other weights (`teacher_model_kind` base or ema), are not run.

    Args:
        prefix_sharing: compute what x1 and x2 have in common once. Where x2 needs gradients itself (a hard loss, an
            edge in which it learns, target_grad flow), or x1 has to wait for another level, nothing is shared.
        together: all levels in one pass, as a reference; None: where target_grad is flow.

    Raises:
        ConfigError: nothing is trained.
    """
    objective.check()
    if together or (together is None and objective.target_grad == "flow"):
        shared = prefix_sharing and {1, 2} <= objective.levels and 2 not in objective.trained
        return (Pass(tuple(sorted(objective.levels)), True, shared),)
    passes: list[Pass] = []
    waiting, computed = set(objective.levels), set[int]()
    while waiting:
        missing = {
            level: {edge.teacher for edge in objective.edges if edge.student == level} - computed - objective.taught
            for level in sorted(waiting, reverse=True)
        }
        level = next((level for level, teachers in missing.items() if not teachers), None)
        if level is None:
            # a cycle: one teacher is read at the present weights first
            level = max(next(iter(missing.values())))
            passes.append(Pass((level,), False))
        else:
            passes.append(Pass((level,), level in objective.trained))
            waiting.remove(level)
        computed.add(level)
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
    fixed: Mapping[int, FixedTeacher] | None = None,
    hard_levels: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Carry out the passes; gradients add up in the parameters.

    Samples with two answers have their hard losses at the gold one, in passes of their own, and their edges at the
    other.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        backward: called with the loss of each pass that has one; None: no gradients at all (held-out loss).
        unsynced: context in which gradients are not yet exchanged between processes: all but the last backward.
        fixed: teachers by level that replace the live ones; every level that teaches needs one if `teacher_model_kind`
            is base or ema and the level does not run.
        hard_levels: those whose hard loss counts, for samples with two answers.

    Returns:
        Values of each sample by name, [B] float64, averaged over answer positions.
    """
    hidden: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    hard: dict[str, Tensor] = {}
    last = max((index for index, p in enumerate(passes) if p.backward), default=-1)
    if batch.graded is not None and backward is not None:
        for level in hard_levels:
            with unsynced():
                loss, trace = model(batch.graded, (level,), hard_only=True)
                backward(loss)
            hard |= trace.values
    for index, step in enumerate(passes):
        learns = backward is not None and step.backward
        with nullcontext() if index == last else unsynced(), torch.set_grad_enabled(learns):
            loss, trace = model(batch, step.levels, hidden, fixed, step.shared)
            if learns and backward is not None:
                backward(loss)
        del loss
        hidden.update(trace.hidden)
        # a level that runs twice because of a cycle gives the same values twice
        values.update(trace.values)
    two = [place for place, example in enumerate(batch.examples) if example.gold is not None]
    for name in hard.keys() & values.keys() if two else ():
        if name.startswith("hard"):
            values[name][two] = hard[name]
    return values
