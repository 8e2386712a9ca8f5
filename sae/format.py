"""The folder of one SAE in sae-lens's format: `cfg.json` and `sae_weights.safetensors`.

The parameters written are those of Eq. 2. What sae-lens computes around them is folded in on reading, in float64:

- `rescale_acts_by_decoder_norm`, with n the row norms of W_dec: W_enc <- W_enc n, b_enc <- b_enc n, W_dec <- W_dec / n.
- `apply_b_dec_to_input: false`: b_enc <- b_enc + b_dec W_enc.
- `normalize_activations: expected_average_only_in` with the factor s in `activation_scaler.json`: W_enc <- s W_enc,
  W_dec <- W_dec / s, b_dec <- b_dec / s.
- architecture gated: W_enc <- W_enc e^r_mag, b_enc = b_mag, threshold = b_mag - b_gate e^r_mag.

Architectures read: topk, jumprelu, and what infers as such: standard (thresholds 0), gated, batchtopk.
Normalisations that depend on the token (layer_norm, constant_norm_rescale) cannot be folded and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sae import files
from sae.errors import FormatError

CONFIG, WEIGHTS, SCALER = "cfg.json", "sae_weights.safetensors", "activation_scaler.json"
#: Tensors by architecture, beside W_enc, W_dec and b_dec.
_MORE: dict[str, tuple[str, ...]] = {
    "topk": ("b_enc",),
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "batchtopk": ("b_enc", "topk_threshold"),
}
#: Entries of a token's codes where the architecture sets no number of active features.
MOST = 256
#: sae-lens reads configurations without a version, or with one before 6, as an older layout.
FORMAT_VERSION = "6.0.0"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class Stored:
    """Contents of a folder, after folding: W_enc [d_in, d_sae], W_dec [d_sae, d_in], b_enc [d_sae], b_dec [d_in].

    Of a JumpReLU SAE `threshold` [d_sae], too.
    """

    d_in: int
    d_sae: int
    k: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def write(folder: str | Path, stored: Stored) -> None:
    """Write the folder; other files in it stay. After an interrupted write it does not load."""
    folder = Path(folder)
    dtype = next(name for name, value in _DTYPES.items() if value == stored.tensors["W_enc"].dtype)
    config = {
        "architecture": "jumprelu" if "threshold" in stored.tensors else "topk",
        "d_in": stored.d_in,
        "d_sae": stored.d_sae,
        # to sae-lens a JumpReLU SAE has none
        **({} if "threshold" in stored.tensors else {"k": stored.k}),
        "dtype": dtype,
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "rescale_acts_by_decoder_norm": False,
        "metadata": {"sae_lens_version": FORMAT_VERSION, **stored.metadata},
    }
    # without cfg.json a folder does not load, so old settings are never read with new weights
    with files.storage(folder / CONFIG):
        (folder / CONFIG).unlink(missing_ok=True)
    files.write_tensors(folder / WEIGHTS, stored.tensors)
    files.write_json(folder / CONFIG, config)


def read(folder: str | Path, most: int = MOST) -> Stored:
    """Read a folder and fold what sae-lens applies around the parameters into them.

    Args:
        most: k where the architecture sets none.

    Raises FormatError for a missing or damaged file, another architecture or shape, or a normalisation per token.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FormatError("no such folder; an SAE is a folder with cfg.json and sae_weights.safetensors", folder)
    config = _upgrade(files.read_json(folder / CONFIG))
    path = folder / CONFIG
    architecture = config.get("architecture")
    if architecture not in _MORE:
        raise FormatError(f"architecture is {architecture!r}; {', '.join(_MORE)} can be read", path)
    if config.get("activation_fn", "relu") not in ("relu", "topk"):
        raise FormatError(f"activation_fn {config['activation_fn']!r} cannot be read", path)
    if config.get("reshape_activations", "none") != "none":
        raise FormatError(f"reshape_activations {config['reshape_activations']!r} is not for hidden states", path)
    d_in, d_sae = (_count(config, name, path) for name in ("d_in", "d_sae"))
    k = _count(config, "k", path) if architecture == "topk" else min(most, d_sae)
    if k > d_sae:
        raise FormatError(f"k = {k} exceeds d_sae = {d_sae}", path)
    dtype = _DTYPES.get(str(config.get("dtype", "float32")).removeprefix("torch."))
    if dtype is None:
        raise FormatError(f"dtype {config['dtype']!r} is not known", path)
    tensors = _weights(folder / WEIGHTS, d_in, d_sae, architecture)
    if architecture == "standard":
        tensors["threshold"] = torch.zeros_like(tensors["b_enc"])
    tensors = _fold(tensors, config, folder, dtype)
    metadata = config.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise FormatError("metadata is not an object", path)
    return Stored(d_in, d_sae, k, {name: tensor.to(dtype) for name, tensor in tensors.items()}, metadata)


def _upgrade(config: dict[str, Any]) -> dict[str, Any]:
    """Rename the settings of sae-lens before version 6."""
    config = dict(config)
    kwargs = config.get("activation_fn_kwargs") or {}
    if config.get("activation_fn", config.get("activation_fn_str")) == "topk" and "k" in kwargs:
        config.update(architecture="topk", k=kwargs["k"])
    if isinstance(config.get("normalize_activations"), bool):
        config["normalize_activations"] = "expected_average_only_in" if config["normalize_activations"] else "none"
    return config


def _count(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FormatError(f"{name} must be a positive integer, not {value!r}", path)
    return value


def _weights(path: Path, d_in: int, d_sae: int, architecture: str) -> dict[str, Tensor]:
    tensors = files.read_tensors(path)
    scaling = tensors.get("scaling_factor")
    if scaling is not None and not torch.allclose(scaling, torch.ones_like(scaling)):
        raise FormatError("a fine-tuning scaling_factor other than 1 is not part of Eq. 2", path)
    names = ("W_enc", "W_dec", "b_dec", *_MORE[architecture])
    if "topk_threshold" in names and "topk_threshold" in tensors:
        tensors["topk_threshold"] = tensors["topk_threshold"].expand(d_sae)
    return checked({name: tensors.get(name) for name in names}, d_in, d_sae, path)


def checked(tensors: Mapping[str, Tensor | None], d_in: int, d_sae: int, path: Path) -> dict[str, Tensor]:
    """The tensors, each there, of its shape and finite; vectors that are not b_dec are [d_sae]. Else FormatError."""
    shapes = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    found = {}
    for name, tensor in tensors.items():
        shape = shapes.get(name, (d_sae,))
        if tensor is None:
            raise FormatError(f"tensor {name} is missing", path)
        if tuple(tensor.shape) != shape:
            raise FormatError(f"{name} is {list(tensor.shape)}, not {list(shape)}", path)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{name} holds values that are not finite numbers", path)
        found[name] = tensor
    return found


def _fold(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    rescale = bool(config.get("rescale_acts_by_decoder_norm", False))
    subtract = bool(config.get("apply_b_dec_to_input", True))
    normalisation = config.get("normalize_activations", "none")
    if not rescale and subtract and normalisation == "none" and not {"b_gate", "topk_threshold"} & set(tensors):
        return tensors
    # sae-lens computes with parameters already rounded to the declared dtype
    w = {name: tensor.to(dtype).double() for name, tensor in tensors.items()}
    if "b_gate" in w:
        magnitude = w.pop("r_mag").exp()
        w["W_enc"] *= magnitude
        w["b_enc"] = w.pop("b_mag")
        w["threshold"] = w["b_enc"] - w.pop("b_gate") * magnitude
    if "topk_threshold" in w:
        w["threshold"] = w.pop("topk_threshold")
    if rescale:
        norm = torch.linalg.vector_norm(w["W_dec"], dim=1)
        w["W_enc"] *= norm
        w["b_enc"] *= norm
        # a row of length 0 never fires after this
        w["W_dec"] /= torch.where(norm > 0, norm, 1.0)[:, None]
    if not subtract:
        w["b_enc"] += w["b_dec"] @ w["W_enc"]
    if normalisation == "expected_average_only_in":
        scale = _scaling_factor(folder)
        w["W_enc"] *= scale
        w["W_dec"] /= scale
        w["b_dec"] /= scale
    elif normalisation != "none":
        message = f"normalize_activations {normalisation!r} is applied to each token at run time and cannot be folded"
        raise FormatError(f"{message}; train or export with 'none' or 'expected_average_only_in'", folder / CONFIG)
    return w


def _scaling_factor(folder: Path) -> float:
    path = folder / SCALER
    if not path.exists():
        message = f"normalize_activations 'expected_average_only_in' needs {SCALER}, which is missing"
        raise FormatError(f"{message}; fold with sae-lens (fold_activation_norm_scaling_factor)", folder / CONFIG)
    factor = files.read_json(path).get("scaling_factor")
    if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise FormatError(f"scaling_factor must be a positive number, not {factor!r}", path)
    return float(factor)
