"""How well a coder reconstructs, and how its features are used, pooled over any number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sae.errors import ActivationError
from sae.topk import SparseCodes, TopKSAE


class Evaluation:
    """Sums over tokens for one layer, kept in float64; add batches, then read the figures.

    All figures are pooled: sums over every token first, one division at the end.
    """

    def __init__(self, d_in: int, d_sae: int) -> None:
        self.tokens = 0
        self._error = self._square = self._cosine = 0.0
        self._active = 0
        self._sum = torch.zeros(d_in, dtype=torch.float64)
        self._fired = torch.zeros(d_sae, dtype=torch.int64)

    @torch.no_grad()
    def add(self, h: Tensor, reconstruction: Tensor, codes: SparseCodes) -> None:
        """h, reconstruction: [N, d_in]; codes of the same N tokens."""
        h, reconstruction = h.double(), reconstruction.double()
        self.tokens += len(h)
        self._error += float((h - reconstruction).square().sum())
        self._square += float(h.square().sum())
        self._sum += h.sum(0).cpu()
        self._cosine += float(torch.cosine_similarity(h, reconstruction, dim=-1).sum())
        active = codes.active()
        self._active += int(active.sum())
        self._fired += torch.bincount(codes.indices[active], minlength=len(self._fired)).cpu()

    @property
    def fvu(self) -> float:
        """Fraction of variance unexplained: Σ‖h - ĥ‖² / Σ‖h - mean(h)‖²; nan where h does not vary."""
        variance = self._square - float(self._sum.square().sum()) / max(self.tokens, 1)
        return self._error / variance if variance > 0 else float("nan")

    @property
    def l0(self) -> float:
        """Mean number of active features per token."""
        return self._active / max(self.tokens, 1)

    @property
    def cosine(self) -> float:
        """Mean cosine of h and its reconstruction."""
        return self._cosine / max(self.tokens, 1)

    @property
    def dead(self) -> float:
        """Fraction of features that fired on no token."""
        return float((self._fired == 0).double().mean())

    @property
    def density(self) -> Tensor:
        """Fraction of tokens on which each feature fired, [d_sae] float64."""
        return self._fired.double() / max(self.tokens, 1)

    def summary(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "fvu": self.fvu, "cosine": self.cosine, "l0": self.l0, "dead": self.dead}


def evaluate(coders: Mapping[int, TopKSAE], batches: Iterable[Mapping[int, Tensor]]) -> dict[int, Evaluation]:
    """Run every layer's coder over its activations ([N, d_in] each).

    Raises:
        ActivationError: no tokens.
    """
    results = {layer: Evaluation(coder.d_in, coder.d_sae) for layer, coder in coders.items()}
    for batch in batches:
        for layer, coder in coders.items():
            h = batch[layer].to(coder.W_enc)
            with torch.no_grad():
                codes = coder.encode(h)
                results[layer].add(h, coder.decode(codes), codes)
    if not all(result.tokens for result in results.values()):
        raise ActivationError("no tokens to evaluate on")
    return results
