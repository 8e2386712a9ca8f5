"""Floating-point operations of matrix products and attention as they are executed; sizes of Qwen3-VL to count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
Arch = Literal["small", "nano", "qwen3-vl-2b", "qwen3-vl-8b"]


def config_of(arch: Arch, layers: int | None) -> Any:
    """The Qwen3-VL configuration of that size, with at most `layers` decoder layers."""
    from remind.models.nano import nano_config

    if arch == "nano":
        config = nano_config()
    else:
        # width, layers, query heads, key/value heads, vocabulary; vision tower: depth, width, MLP, heads, DeepStack
        sizes = {
            "small": (512, 6, 8, 4, 8192, (2, 64, 128, 2, [0, 1])),
            "qwen3-vl-2b": (2048, 28, 16, 8, 151_936, (24, 1024, 4096, 16, [5, 11, 17])),
            "qwen3-vl-8b": (4096, 36, 32, 8, 151_936, (27, 1152, 4304, 16, [8, 16, 24])),
        }
        width, depth, heads, kv_heads, vocabulary, vision_sizes = sizes[arch]
        config = nano_config(width, depth, heads, kv_heads)
        text, vision = config.text_config, config.vision_config
        text.vocab_size, text.max_position_embeddings, text.pad_token_id = vocabulary, 262_144, None
        config.tie_word_embeddings = text.tie_word_embeddings = arch != "qwen3-vl-8b"
        vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads, deep = vision_sizes
        vision.deepstack_visual_indexes, vision.num_position_embeddings = deep, 2304
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        for number, name in enumerate(tokens):
            setattr(config, name, vocabulary - 8 + number)
    if layers is not None:
        config.text_config.num_hidden_layers = min(layers, config.text_config.num_hidden_layers)
    return config


def executed(step: Callable[[], Any]) -> int:
    """Operations of one call of `step`, layers computed again counted again; a causal product counts half.

    torch's own counter leaves causality out, and attention on a CPU as well.
    """
    mapping: dict[Any, Any] = {}
    for name in _FORWARD:
        forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None)
        backward = getattr(
            torch.ops.aten,
            "_scaled_dot_product_flash_attention_for_cpu_backward"
            if name.endswith("cpu")
            else f"_scaled_dot_product_{name}_backward",
            None,
        )
        if forward is not None and backward is not None:
            mapping[forward] = _counted(forward, 0, sdpa_flop_count)
            mapping[backward] = _counted(backward, 1, sdpa_backward_flop_count)
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        step()
    return int(counter.get_total_flops())


def _counted(operator: Any, first: int, count: Callable[..., int]) -> Callable[..., int]:
    """`count` of the shapes of query, key and value (arguments `first` to `first` + 2), halved where causal."""
    names = [argument.name for argument in operator.default._schema.arguments]
    place = names.index("is_causal")

    def formula(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        shapes = args[first : first + 3]
        causal = args[place] if place < len(args) else kwargs.get("is_causal", False)
        total = count(args[0], *shapes) if first else count(*shapes)
        return total // 2 if causal else total

    return formula
