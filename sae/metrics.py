"""Reconstruction quality and feature usage of a coder, pooled over any number of tokens.

Figures are float64 sums over tokens divided once, at the end, so that batching does not change them and the sums of
several processes add up. sae-lens's names are in brackets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sae.errors import ActivationError, LayerError, ShapeError
from sae.topk import SparseCodes, TopKSAE

if TYPE_CHECKING:
    from sae.harvest import TokenBatch

#: Numbers of hidden states held in float64 at a time: 2^24, 128 MB.
_CHUNK = 1 << 24
#: Below this share of Σ‖h‖² the difference Σ‖h‖² - ‖Σh‖²/N is rounding.
_NO_SPREAD = 1e-12
_BINS_PER_DECADE = 4


class Sums:
    """Figures made of sums over tokens: one flat float64 tensor on the CPU that starts with the number of tokens.

    A figure that is not defined (no tokens, ...) is nan.
    """

    #: Names of the figures in a summary.
    names: tuple[str, ...] = ()

    def __init__(self, size: int) -> None:
        self._sums = torch.zeros(size, dtype=torch.float64)

    def sums(self) -> Tensor:
        """A copy of all sums, [n] float64: what data-parallel processes all-reduce (by sum) and load again."""
        return self._sums.clone()

    def load_sums(self, sums: Tensor) -> None:
        """Replace the sums by those of an object of the same kind. Raises ShapeError for another number of them."""
        if sums.shape != self._sums.shape:
            raise ShapeError(f"sums {list(sums.shape)} do not fit {type(self).__name__}, which has {len(self._sums)}")
        self._sums.copy_(sums)

    @property
    def tokens(self) -> int:
        """Number of tokens the figures are computed from."""
        return int(self._sums[0])

    def summary(self) -> dict[str, Any]:
        """All figures as plain JSON values; None where one is not defined."""
        values = {name: getattr(self, name) for name in self.names}
        return {"tokens": self.tokens, **{n: value if math.isfinite(value) else None for n, value in values.items()}}

    def _mean(self, which: int) -> float:
        return float(self._sums[which]) / self.tokens if self.tokens else math.nan


#: The scalar sums, in their order before Σh and the firing counts.
_, _ERROR, _SQUARE, _COSINE, _ACTIVE, _SCALARS = range(6)


class Evaluation(Sums):
    """The figures of one layer: add batches, then read.

    Variance comes from sums of squares: in float64 good to 1e-6 while the mean is below about 1e4 times the spread.
    """

    names = ("fvu", "explained_variance", "mse", "cosine", "l0", "dead")

    def __init__(self, d_in: int, d_sae: int) -> None:
        super().__init__(_SCALARS + d_in + d_sae)
        self.d_in, self.d_sae = d_in, d_sae

    @torch.no_grad()
    def add(self, h: Tensor, reconstruction: Tensor, codes: SparseCodes) -> None:
        """h, reconstruction: [N, d_in]; codes of the same N tokens. Raises ShapeError for parts that do not fit."""
        self._sums += self._of(h, reconstruction, codes)

    def _of(self, h: Tensor, reconstruction: Tensor, codes: SparseCodes) -> Tensor:
        """The sums of these tokens alone, on the CPU."""
        if h.ndim != 2 or h.shape[1] != self.d_in or reconstruction.shape != h.shape or len(codes.values) != len(h):
            raise ShapeError(
                f"h {list(h.shape)}, reconstruction {list(reconstruction.shape)} and codes {list(codes.values.shape)} "
                f"must be [N, {self.d_in}] twice and [N, k]"
            )
        h, out = h.double(), reconstruction.to(h.device).double()
        active = codes.active()
        scalars = torch.stack(
            [
                h.new_full((), len(h)),
                (h - out).square().sum(),
                h.square().sum(),
                torch.cosine_similarity(h, out, dim=1).sum(),
                active.sum().to(h),
            ]
        )
        fired = torch.bincount(codes.indices[active], minlength=self.d_sae)
        return torch.cat([scalars, h.sum(0), fired.to(h)]).cpu()

    @property
    def fvu(self) -> float:
        """Fraction of variance unexplained: Σ‖h - ĥ‖² / Σ‖h - mean(h)‖²; nan where h does not vary."""
        square = float(self._sums[_SQUARE])
        spread = square - float(self._sums[_SCALARS : _SCALARS + self.d_in].square().sum()) / max(self.tokens, 1)
        return float(self._sums[_ERROR]) / spread if spread > _NO_SPREAD * square else math.nan

    @property
    def explained_variance(self) -> float:
        """1 - FVU."""
        return 1 - self.fvu

    @property
    def mse(self) -> float:
        """Mean over tokens of ‖h - ĥ‖², summed (not averaged) over the d_in dimensions, in squared units of h."""
        return self._mean(_ERROR)

    @property
    def l0(self) -> float:
        """Mean number of active features per token."""
        return self._mean(_ACTIVE)

    @property
    def cosine(self) -> float:
        """Mean cosine of h and ĥ [cossim]."""
        return self._mean(_COSINE)

    @property
    def dead(self) -> float:
        """Fraction of features that fired on none of `tokens` tokens."""
        return float((self.fired == 0).double().mean()) if self.tokens else math.nan

    @property
    def density(self) -> Tensor:
        """Fraction of tokens on which each feature fired, [d_sae] float64."""
        return self.fired / max(self.tokens, 1)

    def summary(self) -> dict[str, Any]:
        """All figures as plain JSON values, and the histogram of densities."""
        return {**super().summary(), "density_histogram": density_histogram(self.fired, self.tokens)}

    @property
    def fired(self) -> Tensor:
        """[d_sae] on how many tokens each feature was active."""
        start = _SCALARS + self.d_in
        return self._sums[start : start + self.d_sae]


def density_histogram(fired: Tensor, tokens: int) -> dict[str, Any]:
    """Features by firing density, in bins of equal width in log10.

    Args:
        fired: [d_sae], on how many of `tokens` tokens each feature fired.

    Returns:
        `edges` [n + 1], ascending densities from 1e-6 (or a lower power of ten, if 1 / tokens is lower) to 1;
        `counts` [n], bin i without its upper edge, the last with 1; `never`, features that did not fire.
    """
    lowest = -6
    while 10.0**lowest * tokens > 1:
        lowest -= 1
    edges = [10 ** (lowest + i / _BINS_PER_DECADE) for i in range(-lowest * _BINS_PER_DECADE + 1)]
    density = fired[fired > 0].double() / max(tokens, 1)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(density, inner, right=True), minlength=len(edges) - 1)
    return {"edges": edges, "counts": counts.tolist(), "never": len(fired) - len(density)}


class LayerEvaluation(Evaluation):
    """The pooled figures of a layer, and those of its text and its visual tokens apart.

    `sums` and `load_sums` carry all three. `all` is the pooled part alone; its figures can also be read here.
    """

    def __init__(self, d_in: int, d_sae: int) -> None:
        super().__init__(d_in, d_sae)
        size = len(self._sums)
        # one tensor for all three parts; the inherited figures read the first
        self._sums = torch.zeros(3 * size, dtype=torch.float64)
        self.all, self._text, self._visual = (Evaluation(d_in, d_sae) for _ in range(3))
        for part, sums in zip((self.all, self._text, self._visual), self._sums.split(size), strict=True):
            part._sums = sums

    @torch.no_grad()
    def add(self, h: Tensor, reconstruction: Tensor, codes: SparseCodes, visual: Tensor) -> None:  # type: ignore[override]
        """As `Evaluation.add`. visual: [N] bool, image and video tokens."""
        if visual.shape != h.shape[:1]:
            raise ShapeError(f"visual {list(visual.shape)} for hidden states {list(h.shape)}")
        visual = visual.to(h.device, torch.bool)
        for part, which in ((self._text, ~visual), (self._visual, visual)):
            sums = part._of(h[which], reconstruction[which], codes[which])
            part._sums += sums
            self.all._sums += sums

    @property
    def text(self) -> Evaluation | None:
        """Text tokens, with a mean of their own; None without any."""
        return self._text if self._text.tokens else None

    @property
    def visual(self) -> Evaluation | None:
        """Image and video tokens; None as for `text`."""
        return self._visual if self._visual.tokens else None

    def summary(self) -> dict[str, Any]:
        """The pooled figures, and under `text` and `visual` the same of each kind, or None."""
        parts = {"text": self.text, "visual": self.visual}
        return {**self.all.summary(), **{name: part and part.summary() for name, part in parts.items()}}


@torch.no_grad()
def evaluate(
    coders: Mapping[int, TopKSAE],
    batches: Iterable[TokenBatch],
) -> dict[int, LayerEvaluation]:
    """Evaluate every layer's coder on held-out activations.

    Args:
        coders: by layer.
        batches: of `sae.harvest`. Layers without a coder are ignored.

    Raises ActivationError for values that are not finite, LayerError or ShapeError for another batch.
    """
    results = {layer: LayerEvaluation(coder.d_in, coder.d_sae) for layer, coder in coders.items()}
    for number, batch in enumerate(batches):
        activations = batch.activations
        for layer, coder in coders.items():
            if layer not in activations:
                raise LayerError(f"batch {number} holds layers {sorted(activations)}; the coder of {layer} has none")
            h = activations[layer]
            rows = max(1, _CHUNK // coder.d_in)
            for start in range(0, len(h), rows):
                part = slice(start, start + rows)
                piece = h[part].to(coder.W_enc.device)
                try:
                    codes = coder.encode(piece)
                    results[layer].add(piece, coder.decode(codes), codes, batch.visual[part])
                except (ActivationError, ShapeError) as error:
                    raise type(error)(f"batch {number}, layer {layer}: {error}") from None
    return results
