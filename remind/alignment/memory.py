"""What memory a training step is computed to need, before the first one."""

from __future__ import annotations

from math import ceil
from typing import Any

from remind.alignment.config import TrainConfig
from remind.alignment.model import head_weight
from remind.core.memory import MemoryPlan

#: Tensors of [positions, V] in float32 while a chunk of `chunked_terms` is differentiated: logits of two levels, their
#: log-softmax, probabilities, differences and gradients. Measured.
_LOGITS = 10
#: Vectors as wide as the hidden state that a block has at once for a token, and that it keeps for its backward pass.
#: Measured on blocks with adapters in bfloat16; a rough figure.
_BLOCK, _SAVED = 46, 38
#: Bytes of both moments of a weight in 8 bits, with their scales.
_EIGHT_BITS = 2.03
_HINT = "lora, quantise, or of trainer optimizer adamw8bit, gradient_checkpointing or more gradient_accumulation"


def memory_plan(
    model: Any, cfg: TrainConfig, tokens: int, answer: int, processes: int = 1, sharded: bool = False
) -> MemoryPlan:
    """Of a step; "head" and "block" (forward and backward of one, computed again) are not needed at the same time.

    Sequential steps with live teachers are counted; other teachers have weights or caches of their own.

    Args:
        model: prepared for training: its parameters know whether they learn.
        tokens: of the longest prompt with its answer.
        answer: tokens of the longest answer.
        processes: among which batches are divided, and with `sharded` weights, gradients and moments as well.
    """
    parameters = list(model.parameters())
    trained = [part for part in parameters if part.requires_grad]
    weights, gradients = (sum(p.numel() * p.element_size() for p in some) for some in (parameters, trained))
    numbers = sum(part.numel() for part in trained)
    moments = 2 * gradients if cfg.trainer.optimizer == "adamw" else int(_EIGHT_BITS * numbers)
    text, head = model.config.get_text_config(), head_weight(model)
    layers, width, narrow = int(text.num_hidden_layers), head.shape[1], head.element_size()
    rows = tokens * ceil(cfg.trainer.batch_size / processes / cfg.trainer.gradient_accumulation)
    kept = 1 if cfg.trainer.gradient_checkpointing else _SAVED
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
        "head": 4 * _LOGITS * min(answer * rows // tokens, cfg.objective.chunk) * head.shape[0]
        + (wide if narrow < 4 else 0)
        + (wide if head.requires_grad else 0),
        "block": narrow * rows * (width * _BLOCK + (shared if cfg.trainer.prefix_sharing else 0)),
    }
    if sharded:
        parts |= {name: parts[name] // processes for name in ("weights", "gradients", "moments")}
        block = sum(p.numel() * p.element_size() for p in model.get_decoder().layers[0].parameters())
        # embedding, head and a block with their gradients
        parts["gathered"] = 2 * (2 * narrow * head.numel() + block)
    return MemoryPlan(parts, _HINT, either=("head", "block"))
