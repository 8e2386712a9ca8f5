"""SAEs from their folder, with what they were saved with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from remind.core.errors import ModelError
from sae import SAEError, TopKSAE, layer_folder, load_idf, load_layers


def folder_of_saes(given: str | None, data: Sequence[str], backbone: str, cache: str, device: str, dtype: str) -> Path:
    """The folder given, or that of small SAEs trained now (once: cached by model, data and settings).

    Args:
        data: dialogues to train on; empty: the bundled small talk.
        cache: folder for what is trained.

    Raises:
        DataError, FormatError: data that cannot be read. ModelError: a backbone that cannot be used.
    """
    if given is not None:
        return Path(given)
    from remind.data.sample import corpus_path
    from remind.sae_training import quick_sae

    return quick_sae(backbone, list(data) or [str(corpus_path())], Path(cache).expanduser() / "sae", device, dtype)


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
