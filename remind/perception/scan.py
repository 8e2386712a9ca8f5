"""Cosines with many stored vectors: bounds from 8-bit codes, a quarter of the reading, and exact ones where asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

#: Fewer vectors than this are compared with as they are.
SMALL = 4096
_BLOCK = 4096
#: Room for rounding: of float32 sums, and of 16-bit products.
_ROUNDING = 1e-5
_HALF = 2.0**-8
#: Bytes.
_ALIGNED = 64


def relevance(question: Tensor, cues: Tensor, norms: Tensor | None = None) -> Tensor:
    """Eq. 1: η_n, cosine of φ(q) [d] and φ(κ_n) [N, d] → [N]; 0 where a vector is zero.

    Args:
        norms: lengths of the cues' vectors [N]; None: taken here.
    """
    lengths = cues.norm(dim=-1) if norms is None else norms
    return (cues @ question) / (question.norm() * lengths).clamp_min(1e-12)


class Scan:
    """n vectors to compare a question with.

    Args:
        vectors: rows [n, d], float32.
        tensors: what `encode_rows` gives for them; empty: every cosine is taken from the vectors.
    """

    def __init__(self, vectors: Tensor, tensors: dict[str, Tensor]) -> None:
        self.vectors = vectors
        self.norms: Tensor | None = tensors.get("norms")
        self.coded = "codes" in tensors
        if self.coded:
            codes = tensors["codes"]
            # a file's tensors begin anywhere; the copy is the part that is read for every question
            self._codes = codes.clone() if codes.data_ptr() % _ALIGNED else codes
            self._scales, self._errors = tensors["scales"].numpy(), tensors["errors"].numpy()
            self._mean, self._covariance = tensors.get("mean"), tensors.get("covariance")

    def exact(self, question: Tensor, rows: np.ndarray | None = None) -> np.ndarray:
        """Cosines with these rows (None: all), float64."""
        if rows is None:
            return relevance(question, self.vectors, self.norms).double().numpy()
        places = torch.from_numpy(rows)
        norms = None if self.norms is None else self.norms[places]
        return relevance(question, self.vectors.index_select(0, places), norms).double().numpy()

    def upper(self, question: Tensor) -> np.ndarray:
        """At least the cosine with every row, float32 [n]. Needs codes."""
        unit = question / question.norm().clamp_min(1e-12)
        short = unit.to(torch.bfloat16)
        lost = float((unit - short.float()).norm()) * 1.05 + _ROUNDING
        values = _products(short, self._codes) * self._scales
        found: np.ndarray = values + (self._errors + _HALF * np.abs(values) + lost)
        return found

    def moments(self, question: Tensor) -> tuple[float, float]:
        """Mean and standard deviation of the cosines with all rows. Needs codes, and the moments among them."""
        assert self._mean is not None
        assert self._covariance is not None
        unit = question.double() / question.double().norm().clamp_min(1e-12)
        return float(self._mean @ unit), float((unit @ self._covariance @ unit).clamp_min(0).sqrt())


def _products(question: Tensor, codes: Tensor) -> np.ndarray:
    """Inner products [n] of codes [n, d] and a question of 16 bits, to 16 bits, float32."""
    kernel = _kernel(codes.shape[1])
    if kernel is not None:
        found: Tensor = kernel(question[None], codes, torch.ones(len(codes), dtype=torch.bfloat16))[0]
    else:
        parts = [codes[first : first + _BLOCK].float() @ question.float() for first in range(0, len(codes), _BLOCK)]
        found = torch.cat(parts)
    return found.float().numpy()


@cache
def _kernel(d: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """torch's product of 16-bit rows and 8-bit weights; None where it is missing or another than it was.

    It is private to torch and reads whole registers, wherever a row begins: rows must fill them and be aligned.
    """
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = getattr(torch, "_weight_int8pack_mm", None)
    if kernel is None or d % _ALIGNED:
        return None
    codes = (torch.arange(37 * d).reshape(37, d) * 71 % 255 - 127).to(torch.int8)
    question = torch.nn.functional.normalize((torch.arange(d) * 37 % 101 - 50).float(), dim=0).to(torch.bfloat16)
    try:
        found = kernel(question[None], codes, torch.ones(37, dtype=torch.bfloat16))[0].double()
    except (RuntimeError, TypeError):
        return None
    expected = codes.double() @ question.double()
    return kernel if bool(((found - expected).abs() <= _HALF * expected.abs() + 1e-3).all()) else None


def encode_rows(vectors: Tensor, moments: bool = False) -> dict[str, Tensor]:
    """What a `Scan` of the vectors [n, d] reads instead of them: nothing for few.

    Args:
        moments: also what mean and spread of the cosines follow from.
    """
    n, d = vectors.shape
    if n < SMALL:
        return {}
    codes, scales = torch.empty(n, d, dtype=torch.int8), torch.empty(n)
    errors, norms = torch.empty(n), torch.empty(n)
    for first in range(0, n, _BLOCK):
        part = slice(first, first + _BLOCK)
        norms[part] = vectors[part].norm(dim=-1)
        unit = _unit(vectors[part], norms[part])
        scales[part] = (unit.abs().amax(dim=-1) / 127).clamp_min(1e-12).float()
        step = scales[part].double()[:, None]
        codes[part] = (unit / step).round().to(torch.int8)
        # by Cauchy-Schwarz no unit vector's product is further off than this
        errors[part] = ((unit - codes[part] * step).norm(dim=-1) + _ROUNDING).float()
    found = {"codes": codes, "scales": scales, "errors": errors, "norms": norms}
    return found | (_moments(vectors, norms) if moments else {})


def _unit(vectors: Tensor, norms: Tensor) -> Tensor:
    return vectors.double() / norms.double().clamp_min(1e-12)[:, None]


def _moments(vectors: Tensor, norms: Tensor) -> dict[str, Tensor]:
    """Mean [d] and covariance [d, d] of the unit rows, float64, in two passes so that nothing cancels."""
    n, d = vectors.shape
    blocks = [slice(first, first + _BLOCK) for first in range(0, n, _BLOCK)]
    mean, covariance = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    for part in blocks:
        mean += _unit(vectors[part], norms[part]).sum(dim=0) / n
    for part in blocks:
        off = _unit(vectors[part], norms[part]) - mean
        covariance += off.T @ off / n
    return {"mean": mean, "covariance": covariance}
