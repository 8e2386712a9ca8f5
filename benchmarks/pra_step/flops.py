"""Floating-point operations of matrix products and attention as they are executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


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
