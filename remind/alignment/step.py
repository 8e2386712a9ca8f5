"""One training step on a few samples: the forward and backward passes over x2, x1 and x0.

Where teachers get no gradient, the terms of Eq. 7 are decoupled and each level is run back before the next one is run
forward: one graph lives at a time, so that memory is about that of fine-tuning on x0. With `target_grad: flow` all
levels are run forward first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from remind.alignment.arguments import PRAConfig
from remind.alignment.config import N_LEVELS, Objective
from remind.alignment.examples import Example, pixels_of
from remind.alignment.objective import FixedTeachers, Head, chunked_terms
from remind.core.errors import ConfigError, ModelError
from remind.models.attention import Attention, attends_alone, exchanged_attention
from remind.models.backbone import inner_model, position_ids


class MicroBatch(NamedTuple):
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
    pixels: Mapping[str, Tensor] = {}

    @property
    def own(self) -> list[Example]:
        """Those that count: others stand in where a process has none."""
        return [example for example, weight in zip(self.examples, self.weights.tolist(), strict=True) if weight > 0]


def collate(
    samples: Sequence[tuple[Example, float]],
    always_graded: bool = False,
    blank: tuple[list[int], dict[str, Tensor]] | None = None,
) -> MicroBatch:
    """Samples of unequal lengths, each with its weight in the loss. The padding token is 0; nothing ever reads it.

    Args:
        always_graded: even where no sample has two answers, so that all processes run as many passes.
        blank: tokens and tensors of an image that stands in the padding of batches without any, so that the vision
            tower takes part in every one: with gradients of 0, since nothing attends to what comes later.
    """
    examples, weights = zip(*samples, strict=True)
    input_ids = []
    for level in range(N_LEVELS):
        rows = [torch.cat([example.prompts[level], example.answer[:-1]]).long() for example in examples]
        input_ids.append(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    pixels = pixels_of(examples)
    if blank is not None and not pixels:
        tail = torch.zeros(len(examples), len(blank[0]), dtype=torch.long)
        tail[0], pixels = torch.tensor(blank[0]), blank[1]
        input_ids = [torch.cat([ids, tail], 1) for ids in input_ids]
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
        graded=collate(graded, blank=blank) if graded else None,
        pixels=pixels,
    )


def common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two prompts [n], [m] begin with alike, short of the last token of either.

    The last token of a prompt predicts the first of the answer, so each prompt must run at least that one by itself.
    """
    most = max(min(len(one), len(other)) - 1, 0)
    differ = (one[:most] != other[:most]).nonzero()
    return int(differ[0]) if len(differ) else most


def body_of(model: Any) -> Any:
    """The Hugging Face model without its output head; ends in the final norm. Sees through a PEFT wrapper."""
    model = inner_model(model)
    body = getattr(model, model.base_model_prefix, None)
    if body is None or body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head")
    return body


def head_of(model: Any) -> Head:
    """The output head, with what the model does to its logits besides. Sees through a PEFT wrapper."""
    model = inner_model(model)
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    # PEFT wraps a tied head of which it trains single rows; `weight` of the wrapper has them in it
    plain = head.original_module if hasattr(head, "token_adapter") else head
    if type(plain) is not nn.Linear:
        raise ModelError(f"the output head of {type(model).__name__} is not a plain matrix: {type(head).__name__}")
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return Head(head.weight, plain.bias, scale, getattr(config, "final_logit_softcapping", None))


# Prefix sharing. x2 is x1 with a summary between its dialogue and its question, and a causal model computes the tokens
# before the summary alike in both. While x1 goes forward (with its graph, checkpointed or not), each attention layer's
# keys and values of those tokens are cached, detached; then only the rest of x2 goes forward, without gradient, and
# attends to them. That is x2's own forward to the last bit but for the order of sums, so it is exact wherever x2 only
# teaches and teachers are detached. Keys and values are freed layer by layer, before the backward pass begins.

#: Said where it is not.
_APART = "what x1 and x2 have in common is read twice"


# the model as the step runs it


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
        # whether prefixes can be shared; seen at the first
        self._sharing: bool | None = None

    def encode(self, batch: MicroBatch, level: int) -> Tensor:
        """Final hidden states of the answer positions under a level, [N, d]."""
        hidden = self._run(batch.input_ids[level], self._positions(batch, level), batch.pixels)
        return hidden[batch.rows, batch.starts[level][batch.rows] + batch.offsets]

    def encode_shared(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Final hidden states under x1 and x2, [N, d] each; x2 has no graph. What they have in common runs once, if
        attention alone carries it on.
        """
        decoder, positions, common = self._parts[1], self._positions(batch, 2), batch.common
        if self._sharing is None:
            self._sharing = attends_alone(decoder, _APART)
        if not self._sharing or positions is None:
            one = self.encode(batch, 1)
            with torch.no_grad():
                return one, self.encode(batch, 2)
        longest = int(common.max())
        # by layer: keys and values of the common tokens, [B, heads, longest, head_dim]; padding is not read
        cached: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        mask: Tensor | None = None

        def attend(
            inner: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *its_mask: Any, **more: Any
        ) -> tuple[Tensor, Tensor | None]:
            if mask is None:
                cached[module] = (key[:, :, :longest].detach(), value[:, :, :longest].detach())
                return inner(module, query, key, value, *its_mask, **more)
            before = cached.pop(module)
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
            # flash kernels take no mask, and this one is small
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **more)

        with exchanged_attention(decoder, attend, _APART):
            one = self.encode(batch, 1)
            with torch.no_grad():
                # what follows each sample's prefix, padded on the right
                size, n = int((batch.starts[2] + batch.lengths - common).max()), len(common)
                places = common[:, None] + torch.arange(size, device=common.device)
                places = places.clamp(max=batch.input_ids[2].shape[1] - 1)
                positions = positions.gather(-1, places.expand(*positions.shape[:-1], size))
                # [B, 1, S, longest + S]: which of the cached and of its own tokens each of the S tokens attends to
                before = torch.arange(longest, device=common.device) < common[:, None]
                own = torch.ones(size, size, dtype=torch.bool, device=common.device).tril()
                mask = torch.cat([before[:, None, None].expand(n, 1, size, -1), own.expand(n, 1, size, size)], dim=-1)
                rest = self._run(batch.input_ids[2].gather(1, places), positions, {})
        return one, rest[batch.rows, (batch.starts[2] - common)[batch.rows] + batch.offsets]

    def _run(self, ids: Tensor, positions: Tensor | None, pixels: Mapping[str, Tensor]) -> Tensor:
        """[B, T, d] final hidden states."""
        extra = {} if positions is None else {"position_ids": positions}
        hidden: Tensor = self._parts[0](input_ids=ids, use_cache=False, **pixels, **extra).last_hidden_state
        return hidden

    def _positions(self, batch: MicroBatch, level: int) -> Tensor | None:
        """Given wherever a model takes them: with multimodal RoPE it may add offsets of an earlier image by itself."""
        shown = {"image_grid_thw": batch.pixels.get("image_grid_thw")}
        return position_ids(self._parts[2], {"input_ids": batch.input_ids[level], **shown})

    def _shares(self, batch: MicroBatch) -> bool:
        """Whether all images are in the common prefix of x1 and x2."""
        ids = batch.input_ids[2]
        after = torch.arange(ids.shape[1], device=ids.device) >= batch.common[:, None]
        return not batch.pixels or not bool((after & (ids == self._parts[0].config.image_token_id)).any())

    def forward(
        self,
        batch: MicroBatch,
        levels: tuple[int, ...],
        teachers: Mapping[int, Tensor] | None = None,
        fixed: FixedTeachers | None = None,
        shared: bool = False,
        terms: bool = True,
        hard_only: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor], dict[str, Tensor]]:
        """Run `levels`, and sum over samples weight · (mean over positions of the terms in which they learn).

        Args:
            teachers: hidden states [N, d] of levels that ran before.
            fixed: teachers that replace a level wherever it teaches (`teacher_model_kind` base and ema).
            shared: compute what x1 and x2 have in common once; x2 then gets no gradient.
            terms: False: only the hidden states are wanted; the sum is 0 and there are no values.
            hard_only: edges do not count.

        Returns:
            The sum; and detached, final hidden states by level [N, d] and values by name [B].
        """
        hidden = dict(teachers or {})
        objective = self.hard_only if hard_only else self.objective
        both = shared and {1, 2} <= set(levels) and self._shares(batch)
        if both:
            with torch.set_grad_enabled(torch.is_grad_enabled() and 1 in objective.trained):
                hidden[1], hidden[2] = self.encode_shared(batch)
        for level in levels:
            if not both or level == 0:
                with torch.set_grad_enabled(torch.is_grad_enabled() and level in objective.trained):
                    hidden[level] = self.encode(batch, level)
        loss, values = torch.zeros((), device=batch.targets.device), {}
        if terms:
            share, labelled = (batch.weights / batch.lengths)[batch.rows], batch.labelled[batch.rows]
            head = head_of(self._parts[2])
            loss, positions = chunked_terms(hidden, head, batch.targets, share, objective, levels, fixed, labelled)
            values = {
                name: torch.zeros_like(batch.weights).index_add_(0, batch.rows, value.double()) / batch.lengths
                for name, value in positions.items()
            }
        return loss, {level: h.detach() for level, h in hidden.items()}, values


class Pass(NamedTuple):
    """Levels that go forward together, whether a backward follows, and whether x1 and x2 share their prefix."""

    levels: tuple[int, ...]
    backward: bool
    shared: bool = False


def plan(objective: Objective, prefix_sharing: bool = False) -> tuple[Pass, ...]:
    """The passes of a step: each level after its teachers, each run once unless edges form a cycle.

    With target_grad flow all go at once. Levels that only teach, and do so with other weights (`teacher_model_kind`
    base or ema), are not run.

    Args:
        prefix_sharing: compute what x1 and x2 have in common once. Where x2 needs gradients itself (a hard loss, an
            edge in which it learns, target_grad flow), or x1 has to wait for another level, nothing is shared.
    """
    if objective.target_grad == "flow":
        return (Pass(tuple(sorted(objective.levels)), True),)
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
        elif level == 1 and prefix_sharing and passes and passes[-1] == Pass((2,), False):
            passes[-1] = Pass((1, 2), 1 in objective.trained, shared=True)
            waiting.remove(1)
        else:
            passes.append(Pass((level,), level in objective.trained))
            waiting.remove(level)
        computed.add(level)
    return tuple(passes)


def run(
    model: nn.Module,
    batch: MicroBatch,
    passes: Sequence[Pass],
    backward: Callable[[Tensor], Any] | None,
    unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext,
    fixed: FixedTeachers | None = None,
    hard_levels: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Carry out the passes; gradients add up in the parameters.

    Samples with two answers have their hard losses at the gold one, in passes of their own, and their edges at the
    other.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        backward: called with the loss of each pass that has one; None: no gradients at all (held-out loss).
        unsynced: context in which gradients are not yet exchanged between processes: all but the last backward.
        fixed: teachers that replace the live ones; every level that teaches needs one if `teacher_model_kind` is base
            or ema and the level does not run.
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
                loss, _, found = model(batch.graded, (level,), hard_only=True)
                backward(loss)
            hard |= {name: value for name, value in found.items() if name.startswith("hard")}
    for index, step in enumerate(passes):
        learns = backward is not None and step.backward
        with nullcontext() if index == last else unsynced(), torch.set_grad_enabled(learns):
            loss, states, found = model(batch, step.levels, hidden, fixed, step.shared)
            if learns and backward is not None:
                backward(loss)
        del loss
        hidden |= states
        # a level that runs twice because of a cycle gives the same values twice
        values |= found
    two = [place for place, example in enumerate(batch.examples) if example.gold is not None]
    for name in hard.keys() & values.keys() if two else ():
        values[name][two] = hard[name]
    return values


# the memory that a run needs: computed, said, and compared with what there is before it starts

#: Bytes from which a run says what memory it needs.
_WORTH_SAYING = 1 << 30
#: Tensors of [positions, V] in float32 while a chunk of `chunked_terms` is differentiated: logits of two levels, their
#: log-softmax, probabilities, differences and gradients. Measured.
_LOGITS = 10
#: Vectors as wide as the hidden state that a block has at once for a token, and that it keeps for its backward pass.
#: Measured on blocks with adapters in bfloat16; a rough figure.
_BLOCK, _SAVED = 46, 38
#: Bytes of both moments of a weight in 8 bits, with their scales.
_EIGHT_BITS = 2.03
#: Bytes of a value of an activation under autocast: some stay in float32. Measured (SmolLM2-135M, bf16, on a CPU).
_HALF = 2.4
_HINT = "peft_config, 4 bits, optim adamw_torch_8bit, gradient_checkpointing or more gradient_accumulation_steps"


def capacity(device: torch.device) -> int:
    """Bytes of a device, or of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_plan(model: Any, args: PRAConfig, tokens: int, answer: int) -> dict[str, int]:
    """Bytes of a step by purpose, for each process; last "logits" and "block" (forward and backward of one, computed
    again), of which one is needed at a time.

    Sequential steps with live teachers are counted; other teachers have weights or caches of their own. Under FSDP
    weights, gradients and moments are divided among the processes.

    Args:
        model: prepared for training: its parameters know whether they learn.
        tokens: of the longest prompt with its answer.
        answer: tokens of the longest answer.
    """
    trained = [part for part in model.parameters() if part.requires_grad]
    weights, gradients = (sum(p.numel() * p.element_size() for p in some) for some in (model.parameters(), trained))
    moments = int(_EIGHT_BITS * sum(map(Tensor.numel, trained))) if "8bit" in args.optim else 2 * gradients
    head, batch = head_of(model).weight, args.per_device_train_batch_size or 1
    width = _HALF if args.bf16 or args.fp16 else head.element_size()
    hidden = int(width * tokens * batch * head.shape[1])
    kept = 1 if args.gradient_checkpointing else _SAVED
    parts = {
        "weights": weights,
        "gradients": gradients,
        "moments": moments,
        "activations": hidden * int(model.config.get_text_config().num_hidden_layers) * kept,
        # in float32, and so are the head where it is narrower, and its gradient where it is trained
        "logits": 4 * _LOGITS * min(answer * batch, args.chunk) * head.shape[0]
        + 4 * head.numel() * ((head.element_size() < 4) + head.requires_grad),
        "block": hidden * _BLOCK,
    }
    if args.sharded:
        parts |= {name: parts[name] // args.world_size for name in ("weights", "gradients", "moments")}
    return parts


def most_memory(parts: Mapping[str, int]) -> int:
    """Bytes of a memory plan at their highest point."""
    return sum(parts.values()) - min(parts["logits"], parts["block"])


def check_memory(model: Any, args: PRAConfig, tokens: int, answer: int, device: torch.device, say: bool = True) -> None:
    """Print `memory_plan` to standard error where it is large, unless `say` is false.

    Raises:
        ConfigError: the device cannot hold what is planned.
    """
    parts = memory_plan(model, args, tokens, answer)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    total, most = processes * most_memory(parts), capacity(device)
    *sizes, logits, block = (f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    each = f", for each of {processes} processes" if processes > 1 else ""
    place = "main memory" if device.type == "cpu" else str(device)
    said = " + ".join([*sizes, f"{logits} or {block}"])
    line = f"{place}: {said}{each}: {total / 1e9:.1f} of {most / 1e9:.1f} GB"
    if total > most:
        raise ConfigError(f"the run needs more memory than there is ({line}); {_HINT} would help")
    if say and most_memory(parts) >= _WORTH_SAYING:
        print(f"estimated memory: {line}", file=sys.stderr)


def out_of_memory(error: BaseException, examples: Sequence[Example]) -> str | None:
    """What to say where memory was short, on a device or, by torch's text, on the CPU; None: it is another error."""
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "not enough memory" not in str(error):
        return None
    lengths = {e.id: "/".join(str(len(prompt) + len(e.answer)) for prompt in e.prompts) for e in examples}
    each = ", ".join(f"{name} ({tokens})" for name, tokens in lengths.items())
    return (
        f"at questions {each} (tokens under x0/x1/x2 with the answer): raise gradient_accumulation_steps, set "
        "gradient_checkpointing true, lower chunk, or lower max_length with on_long skip (a new run)"
    )
