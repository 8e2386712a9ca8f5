"""A base model in 4 bits (NF4), as QLoRA trains adapters on it. Needs bitsandbytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from remind.core.errors import ModelError

#: Values that share a scale.
_BLOCK = 64


def bitsandbytes() -> Any:
    """The library. Raises ModelError where it is missing or does not load."""
    try:
        import bitsandbytes as library
    except (ImportError, RuntimeError, OSError) as error:
        raise ModelError(f"4 bits need bitsandbytes (pip install bitsandbytes): {error}") from None
    return library


def quantise(model: Any, device: str) -> None:
    """Put the linear layers of the language model's blocks in NF4, in place, and the model on `device`.

    Embeddings, head, norms and vision tower stay as they are. Products are computed in the precision the layer had.
    A layer at a time goes to the device, so that it never holds the model as it was. Layers whose input is not a
    multiple of 64 wide stay too.
    """
    library = bitsandbytes()
    decoder = model.get_decoder()
    for name, layer in _suited(decoder):
        out, width = layer.weight.shape
        small = library.nn.Linear4bit(
            width, out, layer.bias is not None, compute_dtype=layer.weight.dtype, quant_type="nf4", device="meta"
        )
        small.weight = library.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        small.bias = layer.bias
        # on some CPUs an eval forward would pack the weights anew for good, and then give no gradient, silently
        small.support_avx512bf16_for_cpu = False
        decoder.set_submodule(name, small.to(device))
    model.to(device)
    # PEFT looks for this to choose its adapters
    model.is_loaded_in_4bit = True


def _suited(decoder: nn.Module) -> list[tuple[str, nn.Linear]]:
    linear = [(name, layer) for name, layer in decoder.named_modules() if type(layer) is nn.Linear]
    # others have blocks that cross rows, which bitsandbytes reads back wrongly on CPUs
    return [(name, layer) for name, layer in linear if layer.in_features % _BLOCK == 0]


def left_alone(model: Any) -> list[str]:
    """Full names of the linear layers that `quantise` leaves as they are."""
    chosen = {id(layer) for _, layer in _suited(model.get_decoder())}
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and id(layer) not in chosen]


def dequantise(model: Any) -> None:
    """Replace layers in NF4 by plain ones with the values that they stand for, in place."""
    library = bitsandbytes()
    decoder = model.get_decoder()
    layers = [(name, layer) for name, layer in decoder.named_modules() if isinstance(layer, library.nn.Linear4bit)]
    for name, layer in layers:
        weight = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.to(layer.compute_dtype), requires_grad=False)
        plain.bias = layer.bias
        decoder.set_submodule(name, plain)
    model.is_loaded_in_4bit = False
