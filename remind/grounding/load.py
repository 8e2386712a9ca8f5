"""SAEs from their folder, and whether they fit a backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from remind.core.errors import ModelError
from remind.grounding.config import GroundingConfig
from remind.grounding.encode import Coder
from remind.models.backbone import Backbone
from remind.models.load import BackboneSize
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
    from remind.train_sae import quick_sae

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


def chosen_layers(saes: Mapping[int, Coder], config: GroundingConfig) -> Mapping[int, Coder]:
    return {max(saes): saes[max(saes)]} if config.layers == "last" and saes else saes


def check_saes(
    backbone: Backbone | BackboneSize,
    saes: Mapping[int, Coder],
    idf: Mapping[int, Tensor] | None = None,
    config: GroundingConfig | None = None,
    folder: str | Path | None = None,
) -> None:
    """See that a backbone, of which no more than its size need be known, and SAEs fit together.

    Args:
        idf: by layer, of grounding.
        config: of grounding; None: the SAEs are for something else, and all layers are looked at.
        folder: where the SAEs lie, for messages.

    Raises:
        ModelError: as `Grounder`.
    """
    where = "" if folder is None else f"{folder}: "
    if not saes:
        raise ModelError(f"{where}grounding needs at least one SAE; train some with `remind train-sae`")
    saes, idf = saes if config is None else chosen_layers(saes, config), idf or {}
    for layer, coder in saes.items():
        if not 0 <= layer <= backbone.n_layers:
            raise ModelError(
                f"{where}there is an SAE for layer {layer}, but {backbone.name} has layers 0 to {backbone.n_layers}; "
                "train SAEs on this backbone"
            )
        if coder.d_in != backbone.hidden_size:
            raise ModelError(
                f"{where}the SAE of layer {layer} reads hidden states of width {coder.d_in}, but those of "
                f"{backbone.name} are {backbone.hidden_size} wide; train SAEs on this backbone"
            )
        if layer in idf and idf[layer].shape != (coder.d_sae,):
            raise ModelError(
                f"{where}idf of layer {layer} has shape {tuple(idf[layer].shape)}, but its SAE has {coder.d_sae} "
                "features"
            )
    if config is not None and config.idf == "corpus" and (missing := sorted(set(saes) - set(idf))):
        raise ModelError(f"{where}the SAE of layer {missing[0]} was saved without idf; set grounding.idf to dialogue")
