"""SAEs from their folder, with what they were saved with."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from remind.errors import ModelError
from sae import SAEError, TopKSAE, layer_folder, load_idf, load_layers


def load_saes(folder: str | Path, device: str = "cpu") -> tuple[dict[int, TopKSAE], dict[int, Tensor]]:
    """SAEs by layer, and the idf of those that were saved with one.

    Raises:
        ModelError: no folder of SAEs, or a damaged one.
    """
    try:
        saes = load_layers(Path(folder), device)
        found = {layer: load_idf(layer_folder(Path(folder), layer)) for layer in saes}
    except SAEError as error:
        raise ModelError(str(error)) from None
    return saes, {layer: value for layer, value in found.items() if value is not None}
