"""Hidden states of chosen layers from one forward that stops after the deepest of them, and edits of the stream.

Layer L is Hugging Face's `hidden_states[L]`: 0 the embeddings, L the residual stream after L blocks, n_layers the
output of the last block before the final norm (where transformers gives the entry after it). Layers below n_layers are
read at the input of block L: Qwen3-VL adds visual features (DeepStack) after an early block has returned.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sae.errors import LayerError, ShapeError


class _Stop(Exception):
    """Ends a forward once all layers are there."""


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Find the stack of transformer blocks of the language model (not of a vision tower).

    Raises LayerError for no stack with as many blocks as the configuration says.
    """
    count = text_config(model).num_hidden_layers
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


#: Places in the residual stream, by what leaves block n, or goes into it.
_PLACES = (
    r"blocks\.(?P<n>\d{1,6})\.hook_resid_(?:(?P<input>pre)|post)",
    r"resid_(?:(?P<input>pre)|post)_layer_(?P<n>\d{1,6})",
    r"(?:\w+\.)*(?:layers?|h|blocks)[._](?P<n>\d{1,6})(?:\.(?:(?P<input>input)|output))?",
)


def layer_of(place: str) -> int | None:
    """The layer that a hook of TransformerLens or the module of a block gives; None: not of the residual stream."""
    if re.fullmatch(r"hook_embed|(?:\w+\.)*embed_tokens", place):
        return 0
    if re.search("vis|image|audio", place):
        return None
    matches = [match for pattern in _PLACES if (match := re.fullmatch(pattern, place))]
    return int(matches[0]["n"]) + (matches[0]["input"] is None) if matches else None


def resolve_layers(model: nn.Module, layers: Sequence[int | str]) -> list[int]:
    """Turn layer numbers or names into layer numbers, ascending and each once.

    A name is a number, `embeddings`, `last`, a hook of sae-lens (`blocks.14.hook_resid_pre` is 14, `..._post` 15) or
    the module of a block (`model.language_model.layers.14`, whose output is 15).
    Raises LayerError for a number out of range, or a name of no layer.
    """
    blocks = find_blocks(model)
    named = {"embeddings": 0, "last": len(blocks)}
    numbers = []
    for layer in layers:
        number = int(layer) if str(layer).isdecimal() or isinstance(layer, int) else named.get(layer, layer_of(layer))
        if number is None:
            examples = "blocks.0.hook_resid_pre, model.layers.0, embeddings, last"
            raise LayerError(f"{layer!r} names no layer of {type(model).__name__}; names are such as {examples}")
        numbers.append(number)
    return sorted(check_layers(model, blocks, numbers))


def hidden_states(model: nn.Module, layers: Sequence[int], **inputs: Any) -> dict[int, Tensor]:
    """Read the residual stream at `layers`; blocks beyond the deepest, the final norm and the head are not run.

    Args:
        model: a Hugging Face model, with or without its head.
        layers: 0 to n_layers, at least one; LayerError for one out of range, or none.
        inputs: what the model's forward takes, on its device (input_ids [B, T], attention_mask, pixel_values, ...).

    Returns:
        Layer to [B, T, d], in the order of `layers`; gradients follow the grad mode of the caller.
    """
    blocks = find_blocks(model)
    wanted = check_layers(model, blocks, layers)
    deepest = max(wanted)
    states: dict[int, Tensor] = {}

    def keep(layer: int, state: Tensor) -> None:
        states[layer] = state
        if layer == deepest:
            raise _Stop

    if "use_cache" not in inputs and takes(model, "use_cache"):
        inputs["use_cache"] = False
    with _hooked(blocks, wanted, keep), suppress(_Stop):
        model(**inputs)
    missing = [layer for layer in wanted if layer not in states]
    if missing:
        raise LayerError(f"{type(model).__name__} never ran the block that gives layer {missing[0]}")
    return {layer: states[layer] for layer in wanted}


@contextmanager
def edited(model: nn.Module, edits: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Within the block, each forward of the model continues from `edits[L](h)` instead of its own h at layer L.

    h is [B, T, d] and so must be the result; T is 1 while generating with a cache, after the prompt. Edits of several
    layers see the effect of the edits below them. The hooks are removed with the block, also after an error.

    Raises LayerError for a layer out of range, or none; in the forward ShapeError for an edit of another shape.
    """
    blocks = find_blocks(model)
    layers = check_layers(model, blocks, list(edits))

    def change(layer: int, state: Tensor) -> Tensor:
        result = edits[layer](state)
        if result.shape != state.shape:
            raise ShapeError(f"the edit of layer {layer} made {list(result.shape)} of {list(state.shape)}")
        return result.to(state)

    with _hooked(blocks, layers, change):
        yield


def check_layers(model: nn.Module, blocks: nn.ModuleList, layers: Sequence[int]) -> list[int]:
    """The layers, each once. Raises LayerError for one that is out of range, or none."""
    wanted = list(dict.fromkeys(layers))
    wrong = [layer for layer in wanted if isinstance(layer, bool) or not 0 <= layer <= len(blocks)]
    if wrong or not wanted:
        problem = f"layer {wrong[0]} does not exist" if wrong else "no layer was given"
        raise LayerError(f"{problem}: {type(model).__name__} has layers 0 (embeddings) to {len(blocks)}")
    return wanted


@contextmanager
def _hooked(
    blocks: nn.ModuleList, layers: Sequence[int], visit: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `visit` with each layer and the stream there; its result, unless None, replaces the stream."""

    def before(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = visit(layer, args[0] if args else kwargs["hidden_states"])
        if state is None:
            return None
        return ((state, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": state})

    def after(layer: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # a block of older transformers returns a tuple that starts with the stream
        state = visit(layer, output[0] if isinstance(output, tuple | list) else output)
        if state is None:
            return None
        return type(output)([state, *output[1:]]) if isinstance(output, tuple | list) else state

    handles = []
    try:
        for layer in layers:
            if layer == len(blocks):
                handles.append(blocks[-1].register_forward_hook(partial(after, layer)))
            else:
                handles.append(blocks[layer].register_forward_pre_hook(partial(before, layer), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model. Raises LayerError for a model without one."""
    config = getattr(model, "config", None)
    if config is None:
        raise LayerError(f"{type(model).__name__} has no configuration; a Hugging Face model is needed")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise LayerError(f"the configuration of {type(model).__name__} does not say num_hidden_layers")
    return config


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    forward = getattr(model, "get_base_model", lambda: model)().forward
    return name in inspect.signature(forward).parameters


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter."""
    return next(model.parameters()).device
