"""Hidden states of chosen layers from one forward that stops after the deepest of them.

Layer L is Hugging Face's `hidden_states[L]`: 0 the embeddings, L the residual stream after L blocks, n_layers the
output of the last block before the final norm. (transformers gives its own last entry after that norm, in decoders.)
Layers below n_layers are read where block L takes its input: Qwen3-VL adds visual features (DeepStack) to the stream
after an early block has returned, and an output hook would miss them at visual positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sae.errors import LayerError


class _Stop(Exception):
    """Unwinds a forward that has given all that was asked of it."""


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The stack of transformer blocks of the language model (not of a vision tower).

    Raises:
        LayerError: no stack with as many blocks as the configuration says.
    """
    count = _text_config(model).num_hidden_layers
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not any("vis" in part or "image" in part or "audio" in part for part in name.split("."))
    ]
    if not stacks:
        raise LayerError(f"{type(model).__name__} has no stack of {count} blocks that could be hooked")
    # lists inside blocks (experts) lie deeper than the stack itself
    _, blocks = min(stacks, key=lambda item: item[0].count("."))
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def n_layers(model: nn.Module) -> int:
    """Number of blocks of the language model."""
    return len(find_blocks(model))


def hidden_states(model: nn.Module, layers: Sequence[int], **inputs: Any) -> dict[int, Tensor]:
    """Residual stream at `layers`; blocks beyond the deepest, the final norm and the head are not run.

    Gradients follow the grad mode of the caller.

    Args:
        model: a Hugging Face model, with or without its head.
        layers: 0 to n_layers, at least one.
        inputs: what the model's forward takes, on its device (input_ids [B, T], attention_mask, pixel_values, ...).

    Returns:
        Layer to [B, T, d], in the order asked.

    Raises:
        LayerError: a layer out of range, or none asked for.
    """
    blocks = find_blocks(model)
    wanted = list(dict.fromkeys(layers))
    wrong = [layer for layer in wanted if isinstance(layer, bool) or not 0 <= layer <= len(blocks)]
    if wrong or not wanted:
        what = f"layer {wrong[0]} is not there" if wrong else "no layer was asked for"
        raise LayerError(f"{what}: {type(model).__name__} has layers 0 (embeddings) to {len(blocks)}")
    deepest = max(wanted)
    found: dict[int, Tensor] = {}

    def keep(layer: int, state: Any) -> None:
        found[layer] = state[0] if isinstance(state, tuple | list) else state
        if layer == deepest:
            raise _Stop

    def before(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(layer, args[0] if args else kwargs["hidden_states"])

        return hook

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        keep(len(blocks), output)

    handles = [
        blocks[-1].register_forward_hook(after)
        if layer == len(blocks)
        else blocks[layer].register_forward_pre_hook(before(layer), with_kwargs=True)
        for layer in wanted
    ]
    if "use_cache" not in inputs and _takes(model, "use_cache"):
        inputs["use_cache"] = False
    try:
        model(**inputs)
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
    missing = [layer for layer in wanted if layer not in found]
    if missing:
        raise LayerError(f"{type(model).__name__} never ran the block that gives layer {missing[0]}")
    return {layer: found[layer] for layer in wanted}


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None and isinstance(inner := getattr(model, "module", None), nn.Module):
        config = getattr(inner, "config", None)
    if config is None:
        raise LayerError(f"{type(model).__name__} has no configuration; a Hugging Face model is needed")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise LayerError(f"the configuration of {type(model).__name__} does not say num_hidden_layers")
    return config


def _takes(model: nn.Module, name: str) -> bool:
    forward = getattr(model, "get_base_model", lambda: model)().forward
    return name in inspect.signature(forward).parameters


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter is."""
    return next(model.parameters()).device
