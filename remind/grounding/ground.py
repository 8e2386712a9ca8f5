"""Salience-guided grounding of one question: x0 to x1 (Section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.grounding.codes import StateCodes, joint_codes
from remind.grounding.config import NOT_IN_WINDOWS, GroundingConfig
from remind.grounding.encode import Coder, SparseEncoder
from remind.grounding.fusion import fuse, standardise_turns
from remind.grounding.load import check_saes, chosen_layers
from remind.grounding.matching import best_partners, match_each, question_codes
from remind.grounding.places import Part
from remind.grounding.resonance import combine_layers, guidance, smooth_runs, token_resonance
from remind.grounding.salience import smooth_turns, turn_salience
from remind.grounding.selection import select_blocks
from remind.grounding.signals import TurnIndex
from remind.grounding.store import RecentDialogues
from remind.grounding.trace import GroundingTrace
from remind.grounding.windowed import WindowedCodes
from remind.models.backbone import Backbone
from remind.models.pictures import Pictures
from remind.states.pyramid import AttentionalState, FactualState
from sae import SparseCodes

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

_KINDS = ("summed", "each")


class Grounder:
    """Marks the turns of a factual state that resonate with its strategy.

    Args:
        backbone: the model whose hidden states the SAEs read.
        saes: by layer number (as `hidden_states[L]`), or controls in their place; moved to the backbone's device.
        idf: by layer, as saved with the SAEs; None or without a layer where there is none.
        config: settings.
        sentences: gives the vectors that `config.fuse` asks for; None: needed only where it weighs retrieval scores.

    Raises:
        ConfigError: `config.fuse` weighs retrieval scores, but there is no sentence encoder; or images are to be shown
            as pixels, but not in `joint`, or to a backbone that takes none.
        ModelError: no SAE, a layer the backbone does not have, widths that differ, or a corpus idf that is missing.
    """

    def __init__(
        self,
        backbone: Backbone,
        saes: Mapping[int, Coder],
        idf: dict[int, Tensor] | None,
        config: GroundingConfig,
        sentences: SentenceEncoder | None = None,
    ) -> None:
        self.config = config
        saes = chosen_layers(saes, config)
        self.idf = {layer: value for layer, value in (idf or {}).items() if layer in saes}
        check_saes(backbone, saes, self.idf, config)
        self.joint = backbone.causal if config.context_codes == "auto" else config.context_codes == "joint"
        complete = set(saes) <= set(self.idf)
        self.corpus_idf = config.idf == "corpus" or (config.idf == "auto" and self.joint and complete)
        if config.images == "pixels" and not self.joint:
            raise ConfigError(NOT_IN_WINDOWS)
        self.pictures: Pictures | None = None
        if config.images == "pixels":
            self.pictures = Pictures(backbone, config.image_tokens, config.image_root, "grounding.")
        self.encoder = SparseEncoder(backbone, saes, config.sink_ratio, config.batch_size)
        self.windowed = WindowedCodes(self.encoder, config.window_tokens, config.cached_dialogues, config.codes_folder)
        if config.fuse is not None and config.fuse.reads_text and sentences is None:
            raise ConfigError(
                "grounding.fuse weighs retrieval scores: give the grounder a sentence encoder, or drop them"
            )
        self.signals: RecentDialogues[TurnIndex] | None = None
        if sentences is not None:
            limit = max(1, config.cached_dialogues)
            self.signals = RecentDialogues(lambda dialogue: TurnIndex(dialogue, sentences), limit)

    def ground(self, state: FactualState) -> AttentionalState:
        """x1 of a factual state: its turns' salience (Eq. 5) and the blocks to be marked.

        A strategy without anchors is grounded by its reasoning alone. Where the strategy has no active feature at all
        nothing is salient and nothing is marked. Where the most salient turn does not fit the budget together with its
        window, it is marked alone; where it does not fit by itself, nothing is.

        Raises:
            ModelError: in `joint`, a prompt longer than the model takes. ImagePathError: an image that cannot be used.
        """
        return self.trace(state).state

    def codes(self, state: FactualState) -> StateCodes:
        """The sparse codes of a state; they depend on no setting of guidance, resonance or selection."""
        codes = joint_codes(self.encoder, state, self.pictures) if self.joint else self.windowed.state_codes(state)
        return self._with_question(codes, state) if self.config.anchor_codes == "question" else codes

    def trace(self, state: FactualState, codes: StateCodes | None = None) -> GroundingTrace:
        """Everything on the way from x0 to x1, for inspection.

        Args:
            codes: what `codes` gives of the state; None: computed here.
        """
        config = self.config
        codes = self.codes(state) if codes is None else codes
        guides = {layer: self._guidance(codes, layer) for layer in codes.layers}
        runs = torch.tensor(state.runs, dtype=torch.int64)
        resonance = {}
        for layer, own in codes.layers.items():
            beta, speakers = self._beta(own.dialogue), codes.speakers(layer)
            resonance[layer] = token_resonance(own.dialogue, guides[layer], codes.turn, speakers, beta, run=state.runs)
        combined = combine_layers(list(resonance.values()))
        smoothed = smooth_runs(combined, runs[codes.turn], config.sigma)
        counted = torch.where((codes.part == Part.TEXT) | (codes.part == Part.CAPTION), codes.turn, -1)
        kinds = {config.match} if config.fuse is None else {kind for kind in _KINDS if config.fuse.weighs(kind)}
        saliences: dict[str, Tensor] = {}
        if "each" in kinds:
            saliences["each"] = self._by_words(codes, counted)
        if "summed" in kinds or not kinds:
            captions = codes.part == Part.CAPTION
            saliences["summed"] = turn_salience(smoothed, counted, captions, len(state.turns), config.lam, config.agg)
        if config.fuse is None:
            salience = smooth_turns(saliences[config.match], state.runs, config.smooth_turns)
        else:
            salience = self._fused(state, saliences, runs, codes.turn_tokens)
        budget = None
        if config.threshold is None:
            budget = min(config.budget_tokens, math.floor(config.budget_share * int(codes.turn_tokens.sum())))
        blocks: list[tuple[int, int]] = []
        if any(bool(v.any()) for v in guides.values()):
            blocks = select_blocks(
                salience,
                codes.turn_tokens,
                budget=budget,
                threshold=config.threshold,
                window=config.window,
                run=state.runs,
            )
            if not blocks and budget is not None and len(salience):
                best = int(salience.argmax())
                if salience[best] > -torch.inf and codes.turn_tokens[best] <= budget:
                    blocks = [(best, best)]
        return GroundingTrace(
            state=AttentionalState(state, tuple(blocks), tuple(salience.tolist())),
            codes=codes,
            guidance=guides,
            resonance=resonance,
            combined=combined,
            smoothed=smoothed,
            budget=budget,
        )

    def _with_question(self, codes: StateCodes, state: FactualState) -> StateCodes:
        """The question's content tokens as anchors."""
        anchors, _ = question_codes(self.encoder, state.dialogue, [state.question.text])
        layers = {layer: replace(own, anchors=anchors[layer]) for layer, own in codes.layers.items()}
        return replace(codes, layers=layers)

    def _by_words(self, codes: StateCodes, turn: Tensor) -> Tensor:
        """`match_each` of the anchors, [n_turns]; several layers standardised and averaged. Turns without tokens: -inf.

        Args:
            turn: int64 [T], turn of each token that counts; -1: does not count.
        """
        n = len(codes.turn_tokens)
        inside = torch.bincount(turn[turn >= 0], minlength=n) > 0
        by_layer = []
        for layer, own in codes.layers.items():
            partners = best_partners(own.dialogue, turn, n, own.anchors, self._idf(codes, layer))
            owner = torch.zeros(partners.shape[1], dtype=torch.int64)
            by_layer.append(match_each(partners, owner, inside[:, None]))
        joined = by_layer[0]
        if len(by_layer) > 1:
            joined = torch.as_tensor(sum(standardise_turns(s, inside[:, None]) for s in by_layer) / len(by_layer))
        return torch.where(inside, joined[:, 0], -torch.inf)

    def _fused(
        self, state: FactualState, resonances: Mapping[str, Tensor], runs: Tensor, turn_tokens: Tensor
    ) -> Tensor:
        """`fuse` of resonances [n_turns] and what retrieval knows of the turns; a turn without tokens stays -inf."""
        config = self.config.fuse
        assert config is not None
        signals = {name: values[:, None] for name, values in resonances.items()}
        signals["length"] = turn_tokens.float().log1p()[:, None]
        if config.reads_text:
            assert self.signals is not None
            retrieved = torch.tensor(state.positions, dtype=torch.int64)
            scores = self.signals.get(state.dialogue).signals([state.question.text])
            signals |= {name: values[retrieved] for name, values in scores.items()}
        fused = fuse(signals, runs[:, None], config)[:, 0]
        silent = next(iter(resonances.values())) == -torch.inf
        return torch.where(silent, -torch.inf, fused)

    def _idf(self, codes: StateCodes, layer: int) -> Tensor:
        if self.config.idf == "none":
            return torch.ones_like(codes.layers[layer].idf)
        return self.idf[layer].cpu().float() if self.corpus_idf else codes.layers[layer].idf

    def _beta(self, codes: SparseCodes) -> float:
        """β in the units of the codes."""
        active = codes.values[codes.active()]
        if self.config.beta_unit is None or not len(active):
            return self.config.beta
        return self.config.beta * self.config.beta_unit * float(active.mean())

    def _guidance(self, codes: StateCodes, layer: int) -> Tensor:
        own, idf = codes.layers[layer], self._idf(codes, layer)
        return guidance(own.reasoning, own.anchors, idf, self.config.alpha, anchor_idf=self.config.anchor_idf)
