"""Top-K sparse autoencoder (Eq. 2): encode to k active features per token, decode by a gather-sum, save and load.

On disk a coder is a folder in sae-lens's format, `cfg.json` and `sae_weights.safetensors`, with the parameters of
Eq. 2. What sae-lens computes around them is folded in on reading, in float64:

- `rescale_acts_by_decoder_norm`, with n the row norms of W_dec: W_enc <- W_enc n, b_enc <- b_enc n, W_dec <- W_dec / n.
- `apply_b_dec_to_input: false`: b_enc <- b_enc + b_dec W_enc.
- `normalize_activations: expected_average_only_in` with the factor s in `activation_scaler.json`: W_enc <- s W_enc,
  W_dec <- W_dec / s, b_dec <- b_dec / s.
- architecture gated: W_enc <- W_enc e^r_mag, b_enc = b_mag, threshold = b_mag - b_gate e^r_mag.

Architectures read: topk, jumprelu, and what infers as such: standard (thresholds 0), gated, batchtopk.
Normalisations that depend on the token (layer_norm, constant_norm_rescale) cannot be folded and are refused.
Files of other publishers are read by `sae.published`.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import files
from sae.errors import ActivationError, ConfigError, FormatError, ShapeError

CONFIG, WEIGHTS, SCALER, IDF = "cfg.json", "sae_weights.safetensors", "activation_scaler.json", "idf.safetensors"
#: Where the parameters of an SAE of another format are; see `sae.published.Mapping`.
MAPPING = "sae_mapping.json"
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
_FORMAT_VERSION = "6.0.0"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

#: Pre-activations computed at a time in `encode` (2^26 numbers), and tokens searched at a time.
_CHUNK = 1 << 26
_ROWS = 512


@dataclass(frozen=True, eq=False)
class SparseCodes:
    """h̃ of Eq. 2 for any number of tokens. Raises ShapeError where the two parts differ in shape.

    Attributes:
        values: [..., k], at least 0, in the units of the coder (see `TopKSAE.finalize`); 0 means inactive.
        indices: [..., k] int64, features; distinct within a token.
    """

    values: Tensor
    indices: Tensor

    def __post_init__(self) -> None:
        if self.values.shape != self.indices.shape or self.values.ndim == 0:
            shapes = f"values {list(self.values.shape)} and indices {list(self.indices.shape)}"
            raise ShapeError(f"{shapes} must be [..., k]")

    @property
    def k(self) -> int:
        return int(self.values.shape[-1])

    def to(self, device: torch.device | str) -> SparseCodes:
        return SparseCodes(self.values.to(device), self.indices.to(device))

    def active(self) -> Tensor:
        """Which entries belong to F_t, [..., k] bool."""
        return self.values > 0

    def __getitem__(self, item: Any) -> SparseCodes:
        """Index the leading dimensions. Raises ShapeError for an index into the last one, k."""
        values = self.values[item]
        if values.ndim == 0 or values.shape[-1] != self.k:
            raise ShapeError(f"{item!r} cuts into the {self.k} entries of a token; index leading dimensions only")
        return SparseCodes(values, self.indices[item])

    def of(self, features: Tensor, d_sae: int) -> Tensor:
        """Activations of some features [F] int64, each once, as [..., F]; 0 where inactive."""
        slots = torch.full((d_sae,), len(features), device=self.indices.device)
        slots[features] = torch.arange(len(features), device=self.indices.device)
        # one more column for all other features
        out = self.values.new_zeros(*self.values.shape[:-1], len(features) + 1)
        return out.scatter_add(-1, slots[self.indices], self.values)[..., :-1]

    def dense(self, d_sae: int) -> Tensor:
        """[..., d_sae] with zeros where inactive; for small inputs and tests."""
        out = self.values.new_zeros(*self.values.shape[:-1], d_sae)
        return out.scatter_add(-1, self.indices.long(), self.values)


class TopKSAE(nn.Module):
    """A Top-K SAE: W_enc [d_in, d_sae], b_enc [d_sae], W_dec [d_sae, d_in], b_dec [d_in].

    A new one starts with random unit rows in W_dec, W_enc its transpose, biases 0. `metadata` holds JSON values that
    are stored in cfg.json, e.g. model and layer.

    Args:
        d_in: width of the hidden states.
        d_sae: number of features.
        k: features kept per token.
        generator: source of the random start; None: torch's global one.

    Raises ConfigError for sizes that are not positive, or k > d_sae.
    """

    def __init__(self, d_in: int, d_sae: int, k: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if d_in < 1 or not 1 <= k <= d_sae:
            raise ConfigError(f"d_in = {d_in}, d_sae = {d_sae}, k = {k}: need d_in >= 1 and 1 <= k <= d_sae")
        self.d_in, self.d_sae, self.k = d_in, d_sae, k
        self.metadata: dict[str, Any] = {}
        rows = F.normalize(torch.randn(d_sae, d_in, generator=generator), dim=1)
        self.W_enc = nn.Parameter(rows.t().clone(memory_format=torch.contiguous_format))
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(rows)
        self.b_dec = nn.Parameter(torch.zeros(d_in))

    def encode(self, h: Tensor) -> SparseCodes:
        """Eq. 2: TopK(ReLU((h - b_dec) W_enc + b_enc), k), on the parameters as they are.

        Entries are in ascending order of feature. Where features tie for the last place, the lowest indices win.

        Args:
            h: [..., d_in], any floating dtype; computed in the dtype of the parameters.

        Raises ShapeError if the last dimension is not d_in, ActivationError for values that are not finite.
        """
        if h.ndim == 0 or h.shape[-1] != self.d_in:
            raise ShapeError(f"hidden states {list(h.shape)} must be [..., {self.d_in}]")
        flat = h.reshape(-1, self.d_in).to(self.W_enc.dtype)
        parts = []
        for part in flat.split(max(1, _CHUNK // self.d_sae)) if len(flat) else (flat,):
            # the last bits of a product depend on its size: one product, but a search by parts that fit a CPU cache
            pre = self.activate(((part - self.b_dec) @ self.W_enc).add_(self.b_enc))
            parts += [top_features(rows, self.k) for rows in (pre.split(_ROWS) if len(pre) else (pre,))]
        values, indices = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
        if not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).any(-1).sum())
            raise ActivationError(f"{bad} of {len(flat)} tokens have hidden states that are not finite or overflow")
        shape = (*h.shape[:-1], self.k)
        return SparseCodes(values.reshape(shape), indices.reshape(shape))

    def activate(self, pre: Tensor) -> Tensor:
        """What TopK and ReLU of Eq. 2 are taken of: the pre-activations [N, d_sae] as they are."""
        return pre

    def decode(self, codes: SparseCodes) -> Tensor:
        """ĥ = Σ_j h̃_j W_dec[j] + b_dec: [..., k] to [..., d_in], touching only the k rows of each token."""
        leading = codes.values.shape[:-1]
        values = codes.values.reshape(-1, codes.k).to(self.W_dec.dtype)
        if not len(values):
            return self.b_dec.expand(*leading, self.d_in)
        indices = codes.indices.reshape(-1, codes.k)
        out = F.embedding_bag(indices, self.W_dec, mode="sum", per_sample_weights=values)
        return (out + self.b_dec).reshape(*leading, self.d_in)

    def forward(self, h: Tensor) -> Tensor:
        """Reconstruction of h, [..., d_in]."""
        return self.decode(self.encode(h))

    @torch.no_grad()
    def finalize(self, scale: float = 1.0, mean: Tensor | None = None) -> TopKSAE:
        """Fold the input normalisation of training into the parameters, once; returns itself.

        A coder trained on (h - mean) * scale afterwards takes h and reconstructs h, with the same codes (in scaled
        units): W_enc <- scale W_enc, W_dec <- W_dec / scale, b_dec <- mean + b_dec / scale.

        Args:
            scale: dimensionless factor, positive.
            mean: [d_in] in units of the hidden state; None: 0.
        """
        if not 0 < scale < float("inf"):
            raise ConfigError(f"scale must be a positive number, not {scale}")
        self.W_enc.mul_(scale)
        self.W_dec.div_(scale)
        self.b_dec.div_(scale)
        if mean is not None:
            if mean.shape != self.b_dec.shape:
                raise ShapeError(f"mean {list(mean.shape)} must be [{self.d_in}]")
            self.b_dec.add_(mean.to(self.b_dec))
        return self

    def save(self, folder: str | Path) -> None:
        """Write `cfg.json` and `sae_weights.safetensors` in sae-lens's format; other files in the folder stay.

        After an interrupted write the folder does not load. Raises FormatError for metadata that is not JSON.
        """
        folder, tensors = Path(folder), {name: tensor.detach() for name, tensor in self.named_parameters()}
        config = {
            "architecture": "jumprelu" if "threshold" in tensors else "topk",
            "d_in": self.d_in,
            "d_sae": self.d_sae,
            # to sae-lens a JumpReLU SAE has none
            **({} if "threshold" in tensors else {"k": self.k}),
            "dtype": next(name for name, value in _DTYPES.items() if value == tensors["W_enc"].dtype),
            "device": "cpu",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "rescale_acts_by_decoder_norm": False,
            "metadata": {"sae_lens_version": _FORMAT_VERSION, **self.metadata},
        }
        # without cfg.json a folder does not load, so old settings are never read with new weights
        if (folder / CONFIG).exists():
            (folder / CONFIG).unlink()
        files.write_tensors(folder / WEIGHTS, tensors)
        files.write_json(folder / CONFIG, config)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> TopKSAE:
        """`sae.load`."""
        return load(folder, device=device)


class JumpReLUSAE(TopKSAE):
    """An SAE whose feature j is active where its pre-activation exceeds `threshold[j]`, as many features as there are.

    z_j = pre_j 1[pre_j > max(threshold_j, 0)] with pre = (h - b_dec) W_enc + b_enc (Rajamanoharan et al. 2024, Eq. 3).
    A ReLU SAE has thresholds of 0; a gated one with shared weights is a JumpReLU (ibid., Appendix E), and so is one
    trained with batch-top-k, at inference. Everything else is as in `TopKSAE`, and codes have k entries a token here,
    too: of a token with more active features the k largest are kept, with a warning.

    Args:
        d_in, d_sae: as in `TopKSAE`.
        k: entries of a token's codes.
        threshold: [d_sae], in units of pre-activations.
    """

    def __init__(self, d_in: int, d_sae: int, k: int, threshold: Tensor) -> None:
        super().__init__(d_in, d_sae, k)
        if threshold.shape != (d_sae,):
            raise ShapeError(f"threshold {list(threshold.shape)} must be [{d_sae}]")
        self.threshold = nn.Parameter(threshold, requires_grad=False)

    def activate(self, pre: Tensor) -> Tensor:
        active = pre > self.threshold.clamp(min=0)
        most = int(active.sum(-1).max()) if len(pre) else 0
        if most > self.k:
            warnings.warn(
                f"{most} features are active at a token; the {self.k} largest are kept: load the SAE with a larger k",
                stacklevel=2,
            )
        return torch.where(active, pre, 0)


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, [n, w] to values and indices [n, k], in no order; any of equal values.

    On a CPU `topk` is slow and maxima are cheap: the k largest lie in the k groups of largest maximum.
    """
    width = x.shape[-1]
    group = 16 if width > 16 * k else 4
    if x.device.type != "cpu" or width <= 8 * k or width % group:
        top = x.topk(k, dim=-1, sorted=False)
        return top.values, top.indices
    # a group is every (width / group)-th number, so that maxima are taken over whole rows of memory
    grouped = x.view(-1, group, width // group)
    groups = largest(grouped.amax(1), k)[1]
    inside = grouped.gather(2, groups[:, None].expand(-1, group, -1)).reshape(len(x), group * k)
    values, place = largest(inside, k)
    which = groups.gather(1, place.remainder(k))
    return values, place.div_(k, rounding_mode="floor").mul_(width // group).add_(which)


def top_features(pre: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of ReLU(pre) per row, by ascending index; among equals at the edge the lowest indices.

    pre [N, d_sae] to values [N, k] (0 where fewer than k are positive) and indices [N, k].
    """
    top, indices = largest(pre, min(k + 1, pre.shape[-1]))
    top, order = top.sort(dim=-1, descending=True)
    indices = indices.gather(-1, order)
    if k < pre.shape[-1]:
        # which of several equal values topk keeps differs between devices and sizes
        tied = ((top[:, k - 1] == top[:, k]) & (top[:, k] > 0)).nonzero().squeeze(-1)
        indices = indices[:, :k]
        if len(tied):
            order = pre.detach()[tied].sort(dim=-1, descending=True, stable=True).indices
            indices = indices.index_copy(0, tied, order[:, :k])
    indices = indices.sort(dim=-1).values
    return pre.gather(-1, indices).relu(), indices


def layer_folder(folder: str | Path, layer: int) -> Path:
    """The subfolder of a layer's coder: `layer_<LL>`."""
    return Path(folder) / f"layer_{layer:02d}"


def load(path: str | Path, *, k: int | None = None, device: torch.device | str = "cpu") -> TopKSAE:
    """Read an SAE; its parameters need no gradient.

    Args:
        path: a folder of sae-lens or sparsify, or with a mapping file that names one layer; a `.sae.pt` of Qwen-Scope,
            or a `params.npz` of Gemma Scope.
        k: entries of a token's codes where the file sets none (see `JumpReLUSAE`), 256 by default.

    Raises FormatError for what is missing, damaged or of another kind.
    """
    path = Path(path)
    if path.suffix in (".pt", ".npz") or (path / MAPPING).exists() or (path / "sae.safetensors").exists():
        from sae.published import load_published

        return load_published(path, k, device)
    if not path.is_dir():
        raise FormatError("no such folder; an SAE is a folder with cfg.json and sae_weights.safetensors", path)
    config = files.read_json(path / CONFIG)
    if not isinstance(config.get("metadata") or {}, dict):
        raise FormatError("its metadata is not a JSON object", path / CONFIG)
    # settings of sae-lens before version 6
    kwargs, normalise = config.get("activation_fn_kwargs") or {}, config.get("normalize_activations")
    if config.get("activation_fn", config.get("activation_fn_str")) == "topk" and "k" in kwargs:
        config.update(architecture="topk", k=kwargs["k"])
    if isinstance(normalise, bool):
        config["normalize_activations"] = "expected_average_only_in" if normalise else "none"
    architecture = config.get("architecture")
    known = {"architecture": tuple(_MORE), "activation_fn": ("relu", "topk"), "reshape_activations": ("none",)}
    for name, values in known.items():
        if config.get(name, values[0]) not in values or (name == "architecture" and name not in config):
            raise FormatError(f"{name} is {config.get(name)!r}; {', '.join(values)} can be read", path / CONFIG)
    sizes = {name: config.get(name) for name in ("d_in", "d_sae", *(("k",) if architecture == "topk" else ()))}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise FormatError(f"{name} must be a positive integer, not {size!r}", path / CONFIG)
    d_in, d_sae = config["d_in"], config["d_sae"]
    k = sizes.get("k", min(k or MOST, d_sae))
    assert k is not None
    if k > d_sae:
        raise FormatError(f"k = {k} exceeds d_sae = {d_sae}", path / CONFIG)
    dtype = _DTYPES.get(str(config.get("dtype", "float32")).removeprefix("torch."))
    if dtype is None:
        raise FormatError(f"dtype {config['dtype']!r} is not known", path / CONFIG)
    stored = files.read_tensors(path / WEIGHTS)
    if not bool((stored.get("scaling_factor", torch.ones(1)) == 1).all()):
        raise FormatError("a fine-tuning scaling_factor other than 1 is not part of Eq. 2", path / WEIGHTS)
    names = ("W_enc", "W_dec", "b_dec", *_MORE[str(architecture)])
    if "topk_threshold" in names and "topk_threshold" in stored:
        stored["topk_threshold"] = stored["topk_threshold"].expand(d_sae)
    tensors = checked({name: stored.get(name) for name in names}, d_in, d_sae, path / WEIGHTS)
    if architecture == "standard":
        tensors["threshold"] = torch.zeros_like(tensors["b_enc"])
    folded = _fold(tensors, config, path, dtype)
    return coder_of({n: tensor.to(dtype) for n, tensor in folded.items()}, k, config.get("metadata") or {}, device)


def load_layers(folder: str | Path, device: torch.device | str = "cpu", k: int | None = None) -> dict[int, TopKSAE]:
    """Read all SAEs of a folder, by the number of the hidden state that they read, ascending; k as in `load`.

    Raises FormatError for no SAE, one that cannot be read, or one of which it is not known what it reads.
    """
    folder = Path(folder)
    if (folder / MAPPING).exists():
        from sae.published import load_mapped

        return load_mapped(folder, k, device)
    found = sae_paths(folder)
    if not found:
        raise FormatError("holds no SAE: expected subfolders such as layer_04 (`remind train-sae` writes them)", folder)
    return {layer: load(found[layer], k=k, device=device) for layer in sorted(found)}


def sae_paths(folder: Path) -> dict[int, Path]:
    """What `load` is given for each SAE of a folder, by the hidden state it reads: folders with cfg.json, or files.

    That is told by its name, or by what sae-lens recorded. Raises FormatError where neither does.
    """
    ours = {path for path in folder.glob("layer_*") if path.is_dir() and path.name.removeprefix("layer_").isdecimal()}
    gemma_scope = sorted(folder.glob("layer_*/**/params.npz"))
    folders = {path.parent for path in folder.glob("*/cfg.json")} | (set() if gemma_scope else ours)
    paths = sorted(folders) or sorted(folder.glob("layer*.sae.pt")) or gemma_scope
    found: dict[int, Path] = {}
    for path in [folder] if (folder / CONFIG).exists() else paths:
        name = path.relative_to(folder).parts[0] if path != folder else path.name
        layer: int | None = None
        if match := re.fullmatch(r"layer(\d+)\.sae\.pt|layers\.(\d+)|layer_(\d+)", name):
            # ours are numbered by hidden state, those of others by block, whose output they read
            others = match[3] is None or path.suffix == ".npz"
            layer = int(match[1] or match[2] or match[3]) + others
        elif name == "embed_tokens":
            layer = 0
        elif path.is_dir():
            config = files.read_json(path / CONFIG)
            metadata = config.get("metadata")
            hook = str((metadata if isinstance(metadata, dict) else config).get("hook_name", ""))
            if match := re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook):
                layer = int(match[1]) + (match[2] == "post")
        if layer is None:
            message = f"it is not known what this SAE reads; write a {MAPPING}, or name the folder layer_<LL>"
            raise FormatError(message, path)
        if layer in found:
            raise FormatError(f"is a second SAE of layer {layer}, beside {found[layer]}", path)
        found[layer] = path
    return found


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder that its SAEs' codes depend on, by its path inside, ascending."""
    if (folder / MAPPING).exists():
        from sae.published import Mapping as Published

        found = [folder / MAPPING, *(folder / name for name in Published.read(folder / MAPPING).layers.values())]
    else:
        inside = [one for path in sae_paths(folder).values() for one in (path.iterdir() if path.is_dir() else (path,))]
        named = [path for path in inside if path.suffix in (".safetensors", ".json", ".pt", ".npz")]
        found = [path for path in named if path.name != "training.json"]
    hashes = {}
    for path in sorted(found):
        with path.open("rb") as file:
            hashes[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def load_idf(folder: str | Path) -> Tensor | None:
    """Read idf [d_sae] float32 of the layer in `folder`; None if it has none. Raises FormatError for a damaged file."""
    path = Path(folder) / IDF
    if not path.exists():
        return None
    idf = files.read_tensors(path).get("idf")
    if idf is None or idf.ndim != 1:
        raise FormatError("holds no tensor idf [d_sae]", path)
    return idf.float()


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
        scale = files.read_json(folder / SCALER).get("scaling_factor")
        if not isinstance(scale, int | float) or not 0 < scale < float("inf"):
            raise FormatError(f"scaling_factor must be a positive number, not {scale!r}", folder / SCALER)
        w["W_enc"] *= scale
        w["W_dec"] /= scale
        w["b_dec"] /= scale
    elif normalisation != "none":
        message = f"normalize_activations {normalisation!r} is applied to each token at run time and cannot be folded"
        raise FormatError(f"{message}; train or export with 'none' or 'expected_average_only_in'", folder / CONFIG)
    return w


def coder_of(
    tensors: Mapping[str, Tensor], k: int, metadata: dict[str, Any], device: torch.device | str = "cpu"
) -> TopKSAE:
    """A coder of these parameters; with a `threshold` a JumpReLU SAE."""
    kind = JumpReLUSAE if "threshold" in tensors else TopKSAE
    coder = kind.__new__(kind)
    nn.Module.__init__(coder)
    (coder.d_in, coder.d_sae), coder.k, coder.metadata = tensors["W_enc"].shape, k, metadata
    for name, tensor in tensors.items():
        setattr(coder, name, nn.Parameter(tensor.to(device).contiguous(), requires_grad=False))
    return coder.eval()
