"""Top-K sparse autoencoders for Hugging Face models, in sae-lens's format.

Training is in `sae.trainer`, harvesting in `sae.harvest` and `sae.buffer`, evaluation in `sae.metrics` and
`sae.splice`, probing in `sae.probe`. What needs torch is imported on first use, so that `import sae` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sae.errors import ActivationError, ConfigError, FormatError, LayerError, SAEError, ShapeError, StorageError

if TYPE_CHECKING:
    from sae.idf import DocumentFrequency, save_idf
    from sae.published import load, load_idf, load_layers, sae_paths
    from sae.topk import JumpReLUSAE, SparseCodes, TopKSAE, layer_folder

_LAZY = dict.fromkeys(("JumpReLUSAE", "SparseCodes", "TopKSAE", "layer_folder"), "sae.topk")
_LAZY |= dict.fromkeys(("DocumentFrequency", "save_idf"), "sae.idf")
_LAZY |= dict.fromkeys(("load", "load_idf", "load_layers", "sae_paths"), "sae.published")

__all__ = [
    "ActivationError",
    "ConfigError",
    "DocumentFrequency",
    "FormatError",
    "JumpReLUSAE",
    "LayerError",
    "SAEError",
    "ShapeError",
    "SparseCodes",
    "StorageError",
    "TopKSAE",
    "layer_folder",
    "load",
    "load_idf",
    "load_layers",
    "sae_paths",
    "save_idf",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
