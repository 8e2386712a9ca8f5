"""What memory a training step is computed to need, before the first one; and what is said where it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    """Of a step; "logits" and "block" (forward and backward of one, computed again) are not needed at the same time.

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
    hidden = head.element_size() * tokens * batch * head.shape[1]
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
    return MemoryPlan(parts, _HINT, either=("logits", "block"))


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
