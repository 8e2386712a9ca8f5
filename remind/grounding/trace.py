"""What grounding saw on the way from x0 to x1, for notebooks and reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remind.core.errors import ModelError
from remind.grounding.codes import StateCodes
from remind.grounding.resonance import flat
from remind.states.pyramid import AttentionalState


@dataclass(frozen=True)
class GroundingTrace:
    """Intermediate results for the T dialogue tokens of one state.

    Attributes:
        state: the outcome; its `salience` is s_turn.
        codes: sparse codes and the tokens' places.
        guidance: v_guide by layer, [d_sae].
        resonance: r_t by layer, [T].
        combined: r_t over layers, [T]; `resonance` itself where there is one layer.
        smoothed: s_t, [T].
        budget: tokens the blocks could hold; None where a threshold was used.
    """

    state: AttentionalState
    codes: StateCodes
    guidance: dict[int, Tensor]
    resonance: dict[int, Tensor]
    combined: Tensor
    smoothed: Tensor
    budget: int | None

    def guiding_features(self, layer: int, n: int = 10) -> list[tuple[int, float]]:
        """The strategy's heaviest features as (feature, weight in v_guide), falling; none of weight 0."""
        return _largest(self._layer(layer), n)

    def top_features(self, layer: int, turn: int, n: int | None = 10) -> list[tuple[int, float]]:
        """What a turn's local alignment is made of: (feature, Σ over its tokens of v[j] h̃_t[j]), falling; none of 0.

        Args:
            turn: index into the retrieved turns.
            n: at most so many; None: all.

        Raises:
            ModelError: a layer without an SAE.
        """
        v = self._layer(layer)
        values, indices = flat(self.codes.layers[layer].dialogue[self.codes.turn == turn])
        shares = values.float() * v[indices]
        return _largest(torch.zeros_like(v).index_add_(0, indices.flatten(), shares.flatten()), n)

    def _layer(self, layer: int) -> Tensor:
        if layer not in self.guidance:
            raise ModelError(f"layer {layer} has no SAE here; there are {', '.join(map(str, self.guidance))}")
        return self.guidance[layer]


def _largest(weights: Tensor, n: int | None) -> list[tuple[int, float]]:
    values, features = weights.sort(descending=True, stable=True)
    pairs = zip(features[:n].tolist(), values[:n].tolist(), strict=True)
    return [(feature, value) for feature, value in pairs if value > 0]
