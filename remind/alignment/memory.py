"""What memory a training step is computed to need, before the first one; and what is said where it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remind.alignment.arguments import PRAConfig
from remind.alignment.examples import Example
from remind.alignment.step import head_of
from remind.core.memory import MemoryPlan

#: Tensors of [positions, V] in float32 while a chunk of `chunked_terms` is differentiated: logits of two levels, their
#: log-softmax, probabilities, differences and gradients. Measured.
_LOGITS = 10
#: Vectors as wide as the hidden state that a block has at once for a token, and that it keeps for its backward pass.
#: Measured on blocks with adapters in bfloat16; a rough figure.
_BLOCK, _SAVED = 46, 38
#: Bytes of both moments of a weight in 8 bits, with their scales.
_EIGHT_BITS = 2.03
_HINT = "peft_config, 4 bits, optim adamw_torch_8bit, gradient_checkpointing or more gradient_accumulation_steps"


def memory_plan(model: Any, args: PRAConfig, tokens: int, answer: int) -> MemoryPlan:
    """Of a step; "head" and "block" (forward and backward of one, computed again) are not needed at the same time.

    Sequential steps with live teachers are counted; other teachers have weights or caches of their own. Under FSDP
    weights, gradients and moments are divided among the processes.

    Args:
        model: prepared for training: its parameters know whether they learn.
        tokens: of the longest prompt with its answer.
        answer: tokens of the longest answer.
    """
    parameters = list(model.parameters())
    trained = [part for part in parameters if part.requires_grad]
    weights, gradients = (sum(p.numel() * p.element_size() for p in some) for some in (parameters, trained))
    numbers = sum(part.numel() for part in trained)
    moments = int(_EIGHT_BITS * numbers) if "8bit" in args.optim else 2 * gradients
    text, head = model.config.get_text_config(), head_of(model).weight
    layers, width, narrow = int(text.num_hidden_layers), head.shape[1], head.element_size()
    rows = tokens * (args.per_device_train_batch_size or 1)
    kept = 1 if args.gradient_checkpointing else _SAVED
    # keys and values of what x1 and x2 share
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    shared = 2 * heads * int(getattr(text, "head_dim", None) or width // text.num_attention_heads) * layers
    wide = 4 * head.numel()
    parts = {
        "weights": weights,
        "gradients": gradients,
        "moments": moments,
        "activations": narrow * rows * width * layers * kept,
        # in float32: logits, the head where it is narrower, its gradient where it is trained
        "head": 4 * _LOGITS * min(answer * rows // tokens, args.chunk) * head.shape[0]
        + (wide if narrow < 4 else 0)
        + (wide if head.requires_grad else 0),
        "block": narrow * rows * (width * _BLOCK + (shared if args.prefix_sharing else 0)),
    }
    if args.sharded:
        parts |= {name: parts[name] // args.world_size for name in ("weights", "gradients", "moments")}
        block = sum(p.numel() * p.element_size() for p in model.get_decoder().layers[0].parameters())
        # embedding, head and a block with their gradients
        parts["gathered"] = 2 * (2 * narrow * head.numel() + block)
    return MemoryPlan(parts, _HINT, either=("head", "block"))


def remedies(examples: Sequence[Example]) -> str:
    """Questions for which memory was short, and the settings to change in the order of what they cost."""
    lengths = {e.id: "/".join(str(len(prompt) + len(e.answer)) for prompt in e.prompts) for e in examples}
    each = ", ".join(f"{name} ({tokens})" for name, tokens in lengths.items())
    return (
        f"at questions {each} (tokens under x0/x1/x2 with the answer): raise gradient_accumulation_steps, set "
        "gradient_checkpointing true, lower chunk, or lower max_length with on_long skip (a new run)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory was short, on a device or, by its text, on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)
