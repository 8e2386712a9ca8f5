"""SAEs as others publish them: sparsify's folders, Qwen-Scope's and Gemma Scope's files, anything else by a mapping.

- sparsify: folders with `cfg.json` and `sae.safetensors`, named by what they read (`layers.10`, `embed_tokens`);
  activation topk, no transcoders.
- Qwen-Scope: `layer10.sae.pt`, read with `weights_only`, so that nothing is run. The output of block 10,
  from which b_dec is not subtracted; k is in the name of the repository (`..._L0_50`), or given.
- Gemma Scope: `layer_10/width_16k/average_l0_39/params.npz`, JumpReLU, no subtraction; the output of block 10.
- Anything else by a file `sae_mapping.json` in the folder; see `Mapping`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from sae import files
from sae.errors import FormatError
from sae.topk import MAPPING, MOST, TopKSAE, checked, coder_of

Activation = Literal["topk", "jumprelu", "relu"]
_TENSORS = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


@dataclass(frozen=True)
class Mapping:
    """Where the parameters of an SAE are in a file of tensors, and what is computed with them.

    Attributes:
        tensors: ours to theirs; W_enc is [d_in, d_sae] and W_dec [d_sae, d_in], so a name that ends in `.T` is
            transposed. Without b_dec it is 0. A jumprelu SAE has a `threshold`.
        activation: what is applied to the pre-activations.
        k: of topk, the active features of a token; of the others the entries of a token's codes.
        subtract_b_dec: whether the encoder reads h - b_dec, or h.
        layers: number of the hidden state, as in `sae.hooks` (0 embeddings, n the output of block n), to a file below
            the folder: safetensors, npz, or what `torch.save` wrote.
    """

    tensors: dict[str, str] = field(default_factory=lambda: dict(_TENSORS))
    activation: Activation = "topk"
    k: int | None = None
    subtract_b_dec: bool = True
    layers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Mapping:
        """Raises FormatError for unknown settings or values of another kind."""
        given = files.read_json(path)
        kinds: dict[str, Any] = {"tensors": dict, "activation": str, "k": int | None, "layers": dict}
        for name, value in given.items():
            if name not in {one.name for one in fields(cls)}:
                raise FormatError(f"{name} is not a setting of a mapping", path)
            if not isinstance(value, kinds.get(name, bool)):
                raise FormatError(f"{name} is {value!r}", path)
        if given.get("activation", "topk") not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise FormatError(f"activation is {given['activation']!r}; {known} are known", path)
        for name in ("tensors", "layers"):
            if not all(isinstance(one, str) for one in given.get(name, {}).values()):
                raise FormatError(f"{name} must hold names", path)
        if wrong := [name for name in given.get("layers", {}) if not name.isdecimal()]:
            raise FormatError(f"layers: {wrong[0]!r} is not a number", path)
        return cls(**given)


_TRANSPOSED = {**_TENSORS, "W_enc": "W_enc.T", "W_dec": "W_dec.T"}
QWEN_SCOPE = Mapping(_TRANSPOSED, subtract_b_dec=False)
GEMMA_SCOPE = Mapping({**_TENSORS, "threshold": "threshold"}, "jumprelu", subtract_b_dec=False)
SPARSIFY = Mapping({"W_enc": "encoder.weight.T", "b_enc": "encoder.bias", "W_dec": "W_dec", "b_dec": "b_dec"})


def load_published(path: Path, k: int | None, device: torch.device | str) -> TopKSAE:
    """`sae.load` of what is not in sae-lens's format."""
    if path.suffix == ".pt":
        return _mapped(path, replace(QWEN_SCOPE, k=k or _k_of(path)), device)
    if path.suffix == ".npz":
        return _mapped(path, replace(GEMMA_SCOPE, k=k), device)
    if not (path / MAPPING).exists():
        return _mapped(path / "sae.safetensors", replace(SPARSIFY, k=_sparsify_k(path / "cfg.json")), device)
    found = load_mapped(path, k, device)
    if len(found) != 1:
        raise FormatError(f"{MAPPING} names {len(found)} layers: read them with load_layers", path)
    return next(iter(found.values()))


def load_mapped(folder: Path, k: int | None, device: torch.device | str) -> dict[int, TopKSAE]:
    """`sae.load_layers` of a folder with a mapping."""
    mapping = Mapping.read(folder / MAPPING)
    if not mapping.layers:
        raise FormatError("names no layers", folder / MAPPING)
    mapping = replace(mapping, k=mapping.k or k)
    paths = {int(layer): folder / name for layer, name in mapping.layers.items()}
    return {layer: _mapped(paths[layer], mapping, device) for layer in sorted(paths)}


def _k_of(path: Path) -> int:
    """k in the name of a repository that is part of the path."""
    numbers = re.findall(r"L0_(\d+)", str(path.absolute()))
    if not numbers:
        raise FormatError(f"k is not in the path (such as ..._L0_50); say k, or write a {MAPPING}", path)
    return int(numbers[-1])


def _sparsify_k(path: Path) -> int:
    config = files.read_json(path)
    for name, plain in {"activation": "topk", "transcode": False, "skip_connection": False, "signed": False}.items():
        if config.get(name, plain) != plain:
            raise FormatError(f"{name} is {config[name]!r}; only {plain!r} can be read", path)
    k = config.get("k")
    if not isinstance(k, int) or k < 1:
        raise FormatError(f"k must be a positive integer, not {k!r}", path)
    return k


def _mapped(path: Path, mapping: Mapping, device: torch.device | str) -> TopKSAE:
    stored = _tensors_of(path)
    tensors: dict[str, Tensor | None] = {}
    for ours in ("W_enc", "b_enc", "W_dec", "b_dec", *(("threshold",) if mapping.activation == "jumprelu" else ())):
        theirs = mapping.tensors.get(ours)
        if theirs is None and ours != "b_dec":
            raise FormatError(f"the mapping names no tensor for {ours}", path)
        tensor = None if theirs is None else stored.get(theirs.removesuffix(".T"))
        if tensor is None and theirs is not None:
            held = ", ".join(sorted(stored)) or "none"
            raise FormatError(f"holds no tensor {theirs.removesuffix('.T')!r} for {ours}; there are: {held}", path)
        tensors[ours] = tensor.t() if tensor is not None and str(theirs).endswith(".T") else tensor
    encoder = tensors["W_enc"]
    assert encoder is not None
    if encoder.ndim != 2:
        raise FormatError(f"W_enc is {list(encoder.shape)}, not [d_in, d_sae]", path)
    d_in, d_sae = encoder.shape
    if tensors["b_dec"] is None:
        tensors["b_dec"] = encoder.new_zeros(d_in)
    if mapping.activation == "topk" and mapping.k is None:
        raise FormatError("the mapping says no k", path)
    k = mapping.k if mapping.activation == "topk" else min(mapping.k or MOST, d_sae)
    assert k is not None
    if not 1 <= k <= d_sae:
        raise FormatError(f"k = {k}, but there are {d_sae} features", path)
    found = checked(tensors, d_in, d_sae, path)
    if mapping.activation == "relu":
        found["threshold"] = torch.zeros_like(found["b_enc"])
    if not mapping.subtract_b_dec:
        # by parts: in float64 all of it may be larger than what is left of the memory
        shift = [found["b_dec"].double() @ part.double() for part in found["W_enc"].split(4096, dim=1)]
        found["b_enc"] = (found["b_enc"].double() + torch.cat(shift)).to(found["b_enc"].dtype)
    return coder_of(found, k, {"path": str(path)}, device)


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, nothing executed. Raises FormatError."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".safetensors": files.read_tensors,
        ".npz": _read_npz,
        ".pt": files.read_torch,
        ".pth": files.read_torch,
    }
    if path.suffix not in readers:
        raise FormatError(f"is not a file of tensors ({', '.join(readers)})", path)
    tensors = files.parsed(path, readers[path.suffix])
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise FormatError("holds no dictionary of tensors", path)
    return tensors


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except BadZipFile as error:
        raise FormatError(f"damaged, or not an npz file ({error})", path) from None
