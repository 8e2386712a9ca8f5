"""Top-K sparse autoencoders for Hugging Face models, in sae-lens's format.

Training is in `sae.trainer`, harvesting in `sae.harvest`, `sae.buffer` and `sae.cache`, evaluation in `sae.metrics` and
`sae.splice`, probing in `sae.probe`.
"""

from sae.errors import ActivationError, ConfigError, FormatError, LayerError, SAEError, ShapeError, StorageError
from sae.idf import DocumentFrequency, load_idf, save_idf
from sae.topk import SparseCodes, TopKSAE, layer_folder, load_layers

__all__ = [
    "ActivationError",
    "ConfigError",
    "DocumentFrequency",
    "FormatError",
    "LayerError",
    "SAEError",
    "ShapeError",
    "SparseCodes",
    "StorageError",
    "TopKSAE",
    "layer_folder",
    "load_idf",
    "load_layers",
    "save_idf",
]
