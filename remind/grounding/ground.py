"""Salience-guided grounding of one question: x0 to x1 (Section 4.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remind.backbone import Backbone
from remind.errors import ModelError
from remind.grounding.codes import StateCodes, joint_codes
from remind.grounding.config import GroundingConfig
from remind.grounding.encode import SparseEncoder
from remind.grounding.guidance import guidance
from remind.grounding.places import Part
from remind.grounding.resonance import combine_layers, smooth_runs, token_resonance
from remind.grounding.salience import smooth_turns, turn_salience
from remind.grounding.selection import select_blocks
from remind.grounding.trace import GroundingTrace
from remind.grounding.windowed import WindowedCodes
from remind.pyramid import AttentionalState, FactualState
from sae import SparseCodes, TopKSAE


class Grounder:
    """Marks the turns of a factual state that answer to its strategy.

    Args:
        backbone: the model whose hidden states the SAEs read.
        saes: by layer number (as `hidden_states[L]`); they are moved to the backbone's device.
        idf: by layer, as saved with the SAEs; None or without a layer where there is none.
        config: settings.

    Raises:
        ModelError: no SAE, a layer the backbone has not, widths that differ, or idf of a corpus asked for but missing.
    """

    def __init__(
        self, backbone: Backbone, saes: dict[int, TopKSAE], idf: dict[int, Tensor] | None, config: GroundingConfig
    ) -> None:
        self.config = config
        self.idf = dict(idf or {})
        _check(backbone, saes, self.idf, config)
        self.joint = backbone.causal if config.context_codes == "auto" else config.context_codes == "joint"
        complete = set(saes) <= set(self.idf)
        self.corpus_idf = config.idf == "corpus" or (config.idf == "auto" and self.joint and complete)
        self.encoder = SparseEncoder(backbone, saes, config.sink_ratio, config.batch_size)
        self.windowed = WindowedCodes(self.encoder, config.window_tokens, config.cached_dialogues)

    def ground(self, state: FactualState) -> AttentionalState:
        """x1 of a factual state: its turns' salience (Eq. 5) and the blocks to be marked.

        A strategy without anchors is grounded by its reasoning alone. Where the strategy has no active feature at all
        nothing is salient and nothing is marked; neither where not even one turn fits the budget.

        Raises:
            ModelError: in `joint`, a prompt longer than the model takes.
        """
        return self.trace(state).state

    def trace(self, state: FactualState) -> GroundingTrace:
        """Everything on the way from x0 to x1, for inspection."""
        config = self.config
        codes = joint_codes(self.encoder, state) if self.joint else self.windowed.state_codes(state)
        guides = {layer: self._guidance(codes, layer) for layer in codes.layers}
        runs = torch.tensor(state.runs, dtype=torch.int64)
        resonance = {
            layer: token_resonance(
                found.dialogue,
                guides[layer],
                codes.turn,
                codes.speakers(layer),
                self._beta(found.dialogue),
                run=state.runs,
            )
            for layer, found in codes.layers.items()
        }
        combined = combine_layers(list(resonance.values()))
        smoothed = smooth_runs(combined, runs[codes.turn], config.sigma)
        counted = (codes.part == Part.TEXT) | (codes.part == Part.CAPTION)
        salience = turn_salience(
            smoothed,
            torch.where(counted, codes.turn, -1),
            codes.part == Part.CAPTION,
            len(state.turns),
            config.lam,
            config.agg,
        )
        salience = smooth_turns(salience, state.runs, config.smooth_turns)
        budget = min(config.budget_tokens, math.floor(config.budget_share * int(codes.turn_tokens.sum())))
        blocks: list[tuple[int, int]] = []
        if any(bool(v.any()) for v in guides.values()):
            blocks = select_blocks(
                salience,
                codes.turn_tokens,
                budget=budget if config.threshold is None else None,
                threshold=config.threshold,
                window=config.window,
                run=state.runs,
            )
        return GroundingTrace(
            state=AttentionalState(state, tuple(blocks), tuple(salience.tolist())),
            codes=codes,
            guidance=guides,
            resonance=resonance,
            combined=combined,
            smoothed=smoothed,
            budget=budget if config.threshold is None else None,
        )

    def _beta(self, codes: SparseCodes) -> float:
        """β in the units of the codes."""
        active = codes.values[codes.active()]
        if self.config.beta_unit is None or not len(active):
            return self.config.beta
        return self.config.beta * self.config.beta_unit * float(active.mean())

    def _guidance(self, codes: StateCodes, layer: int) -> Tensor:
        found = codes.layers[layer]
        idf = self.idf[layer].cpu().float() if self.corpus_idf else found.idf
        return guidance(found.reasoning, found.anchors, idf, self.config.alpha, anchor_idf=self.config.anchor_idf)


def _check(backbone: Backbone, saes: dict[int, TopKSAE], idf: dict[int, Tensor], config: GroundingConfig) -> None:
    if not saes:
        raise ModelError("grounding needs at least one SAE; train some with train_sae.py")
    for layer, coder in saes.items():
        if not 0 <= layer <= backbone.n_layers:
            raise ModelError(
                f"there is an SAE for layer {layer}, but {backbone.name} has layers 0 to {backbone.n_layers}; "
                "train SAEs on this backbone"
            )
        if coder.d_in != backbone.hidden_size:
            raise ModelError(
                f"the SAE of layer {layer} reads hidden states of width {coder.d_in}, but those of {backbone.name} are "
                f"{backbone.hidden_size} wide; train SAEs on this backbone"
            )
        if layer in idf and idf[layer].shape != (coder.d_sae,):
            raise ModelError(
                f"idf of layer {layer} has shape {tuple(idf[layer].shape)}, but its SAE has {coder.d_sae} features"
            )
    if config.idf == "corpus" and (missing := sorted(set(saes) - set(idf))):
        raise ModelError(f"the SAE of layer {missing[0]} was saved without idf; set grounding.idf to dialogue")
