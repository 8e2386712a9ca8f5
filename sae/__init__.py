"""Top-K sparse autoencoders for Hugging Face models, in sae-lens's format."""

from sae.errors import ActivationError, ConfigError, FormatError, LayerError, SAEError, ShapeError
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
    "TopKSAE",
    "layer_folder",
    "load_idf",
    "load_layers",
    "save_idf",
]
