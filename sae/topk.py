"""Top-K sparse autoencoder (Eq. 2): encode to k active features per token, decode by a gather-sum, save and load.

On disk a coder is a folder in sae-lens's format, `cfg.json` and `sae_weights.safetensors`, with the parameters of
Eq. 2; `sae.published` reads it, and the files of others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import files
from sae.errors import ActivationError, ConfigError, ShapeError

CONFIG, WEIGHTS, SCALER, IDF = "cfg.json", "sae_weights.safetensors", "activation_scaler.json", "idf.safetensors"
#: sae-lens reads configurations without a version, or with one before 6, as an older layout.
_FORMAT_VERSION = "6.0.0"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

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
            "dtype": next(name for name, value in DTYPES.items() if value == tensors["W_enc"].dtype),
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
        from sae.published import load

        return load(folder, device=device)

    @classmethod
    def from_pretrained(cls, release: str, sae_id: str, device: torch.device | str = "cpu") -> TopKSAE:
        """As `SAE.from_pretrained` of SAELens: by a repository of the hub and a path in it, or by a release and an id
        in the list of SAELens, if that is installed. Raises FormatError.
        """
        from sae import published

        return published.load(published.release(release, sae_id), device=device)


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
