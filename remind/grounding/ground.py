"""Salience-guided grounding of one question: x0 to x1 (Section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.core.errors import ConfigError, ModelError
from remind.grounding.codes import CACHED_DIALOGUES, Coder, Part, SparseEncoder, StateCodes, WindowedCodes, joint_codes
from remind.grounding.config import GroundingConfig
from remind.grounding.resonance import (
    combine_layers,
    guidance,
    select_blocks,
    smooth_runs,
    standardise_turns,
    token_resonance,
    turn_salience,
)
from remind.models.backbone import Backbone, BackboneSize
from remind.states.pyramid import AttentionalState, FactualState
from sae import SAEError, TopKSAE, load_idf, load_layers, sae_paths

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


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
        return _largest(self.guidance[layer], n)

    def top_features(self, layer: int, turn: int, n: int | None = 10) -> list[tuple[int, float]]:
        """What a turn's local alignment is made of: (feature, Σ over its tokens of v[j] h̃_t[j]), falling; none of 0.

        Args:
            turn: index into the retrieved turns.
            n: at most so many; None: all.
        """
        v, codes = self.guidance[layer], self.codes.layers[layer].dialogue[self.codes.turn == turn]
        shares = codes.values.float() * v[codes.indices]
        return _largest(torch.zeros_like(v).index_add_(0, codes.indices.flatten(), shares.flatten()), n)


def _largest(weights: Tensor, n: int | None) -> list[tuple[int, float]]:
    values, features = weights.sort(descending=True, stable=True)
    pairs = zip(features[:n].tolist(), values[:n].tolist(), strict=True)
    return [(feature, value) for feature, value in pairs if value > 0]


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
        idf: Mapping[int, Tensor] | None,
        config: GroundingConfig,
        sentences: SentenceEncoder | None = None,
    ) -> None:
        self.config = config
        saes = check_saes(backbone, saes, idf, config)
        self.idf = {layer: value for layer, value in (idf or {}).items() if layer in saes}
        self.joint = backbone.causal if config.context_codes == "auto" else config.context_codes == "joint"
        auto = config.idf == "auto" and self.joint and set(saes) <= set(self.idf)
        self.corpus_idf = config.idf == "corpus" or auto
        self.encoder = SparseEncoder(backbone, saes, config.sink_ratio, config.batch_size)
        self.windowed = None
        if not self.joint:
            self.windowed = WindowedCodes(self.encoder, config.window_tokens, config.codes_folder)
        self.pictures = None
        if config.images == "pixels":
            from remind.models.images import Pictures

            self.pictures = Pictures(backbone, config.image_tokens, config.image_root, "grounding.")
        if config.fuse is not None and config.fuse.reads_text:
            from remind.grounding.fusion import TurnIndex

            if sentences is None:
                raise ConfigError(
                    "grounding.fuse weighs retrieval scores: give the grounder a sentence encoder, or drop them"
                )
            self._turn_index = lru_cache(CACHED_DIALOGUES)(lambda dialogue: TurnIndex(dialogue, sentences))

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
        if self.windowed is None:
            codes = joint_codes(self.encoder, state, self.pictures)
        else:
            codes = self.windowed.state_codes(state)
        if self.config.anchor_codes == "strategy":
            return codes
        from remind.grounding.fusion import question_codes

        anchors, _ = question_codes(self.encoder, state.dialogue, [state.question.text])
        layers = {layer: replace(own, anchors=anchors[layer]) for layer, own in codes.layers.items()}
        return replace(codes, layers=layers)

    def trace(self, state: FactualState, codes: StateCodes | None = None) -> GroundingTrace:
        """Everything on the way from x0 to x1, for inspection.

        Args:
            codes: what `codes` gives of the state; None: computed here.
        """
        config = self.config
        codes = self.codes(state) if codes is None else codes
        guides, resonance, idf = {}, {}, {}
        for layer, own in codes.layers.items():
            idf[layer] = self.idf[layer].cpu().float() if self.corpus_idf else own.idf
            if config.idf == "none":
                idf[layer] = torch.ones_like(own.idf)
            guides[layer] = guidance(own.reasoning, own.anchors, idf[layer], config.alpha, anchor_idf=config.anchor_idf)
            active, beta = own.dialogue.values[own.dialogue.active()], config.beta
            if config.beta_unit is not None and len(active):
                beta = config.beta * config.beta_unit * float(active.mean())
            speakers = codes.speakers(layer)
            resonance[layer] = token_resonance(own.dialogue, guides[layer], codes.turn, speakers, beta, run=state.runs)
        combined = combine_layers(list(resonance.values()))
        smoothed = smooth_runs(combined, torch.tensor(state.runs, dtype=torch.int64)[codes.turn], config.sigma)
        captions = codes.part == Part.CAPTION
        counted = torch.where((codes.part == Part.TEXT) | captions, codes.turn, -1)
        summed = turn_salience(smoothed, counted, captions, len(state.turns), config.lam, config.agg)
        salience = summed
        if config.fuse is not None or config.match == "each":
            salience = self._salience_beyond(state, codes, counted, summed, idf)
        budget = None
        if config.threshold is None:
            budget = min(config.budget_tokens, math.floor(config.budget_share * int(codes.turn_tokens.sum())))
        blocks: list[tuple[int, int]] = []
        if any(bool(v.any()) for v in guides.values()):
            blocks = select_blocks(salience, codes.turn_tokens, budget, config.threshold, config.window, state.runs)
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

    def _salience_beyond(
        self, state: FactualState, codes: StateCodes, counted: Tensor, summed: Tensor, idf: Mapping[int, Tensor]
    ) -> Tensor:
        """Salience [n_turns] by what goes beyond the paper: `match_each`, `fuse`.

        A turn without tokens stays -inf.

        Args:
            counted: int64 [T], turn of each token that counts; -1: does not count.
            summed: Eq. 5 [n_turns].
        """
        from remind.grounding.fusion import best_partners, fuse, match_each

        config, n = self.config, len(state.turns)
        saliences = {"summed": summed}
        if config.fuse is None or config.fuse.each or config.fuse.each_context:
            inside = torch.bincount(counted[counted >= 0], minlength=n) > 0
            by_layer = []
            for layer, own in codes.layers.items():
                partners = best_partners(own.dialogue, counted, n, own.anchors, idf[layer])
                owner = torch.zeros(partners.shape[1], dtype=torch.int64)
                by_layer.append(match_each(partners, owner, inside[:, None]))
            if len(by_layer) > 1:
                by_layer = [torch.stack([standardise_turns(s, inside[:, None]) for s in by_layer]).mean(0)]
            saliences["each"] = torch.where(inside, by_layer[0][:, 0], -torch.inf)
        if config.fuse is None:
            return saliences["each"]
        signals = {name: values[:, None] for name, values in saliences.items()}
        signals["length"] = codes.turn_tokens.float().log1p()[:, None]
        if config.fuse.reads_text:
            retrieved = torch.tensor(state.positions, dtype=torch.int64)
            scores = self._turn_index(state.dialogue).signals([state.question.text])
            signals |= {name: values[retrieved] for name, values in scores.items()}
        fused = fuse(signals, torch.tensor(state.runs, dtype=torch.int64)[:, None], config.fuse)[:, 0]
        return torch.where(summed == -torch.inf, -torch.inf, fused)


def folder_of_saes(given: str | None, data: Sequence[str], backbone: str, cache: str, device: str, dtype: str) -> Path:
    """The folder given, or that of small SAEs trained now (once: cached by model, data and settings).

    Args:
        data: dialogues to train on; empty: the bundled small talk.
        cache: folder for what is trained.

    Raises:
        DataError, FormatError: data that cannot be read. ModelError: a backbone that cannot be used.
    """
    from remind.train_sae import quick_sae

    return Path(given or quick_sae(backbone, data, Path(cache).expanduser() / "sae", device, dtype))


def load_saes(folder: str | Path, device: str = "cpu") -> tuple[dict[int, TopKSAE], dict[int, Tensor]]:
    """SAEs by layer, and the idf of those that were saved with one.

    Raises:
        ModelError: no folder of SAEs, or a damaged one.
    """
    try:
        saes = load_layers(folder, device)
        found = {layer: load_idf(path) for layer, path in sae_paths(folder).items()}
    except SAEError as error:
        raise ModelError(str(error)) from None
    return saes, {layer: value for layer, value in found.items() if value is not None}


def check_saes(
    backbone: Backbone | BackboneSize,
    saes: Mapping[int, Coder],
    idf: Mapping[int, Tensor] | None = None,
    config: GroundingConfig | None = None,
    folder: str | Path | None = None,
) -> Mapping[int, Coder]:
    """See that a backbone, of which no more than its size need be known, and SAEs fit together.

    Args:
        idf: by layer, of grounding.
        config: of grounding; None: the SAEs are for something else, and all layers are looked at.
        folder: where the SAEs lie, for messages.

    Returns:
        The SAEs of the layers that the config chooses.

    Raises:
        ModelError: as `Grounder`.
    """
    where = "" if folder is None else f"{folder}: "
    if not saes:
        raise ModelError(f"{where}grounding needs at least one SAE; train some with `remind train-sae`")
    idf = idf or {}
    if config is not None and config.layers == "last":
        saes = {max(saes): saes[max(saes)]}
    those, wrong = f"those of {backbone.name} are {backbone.hidden_size} wide", ""
    for layer, coder in saes.items():
        if not 0 <= layer <= backbone.n_layers:
            wrong = f"there is an SAE for layer {layer}, but {backbone.name} has layers 0 to {backbone.n_layers}"
        elif coder.d_in != backbone.hidden_size:
            wrong = f"the SAE of layer {layer} reads hidden states of width {coder.d_in}, but {those}"
        if wrong:
            raise ModelError(f"{where}{wrong}; train SAEs on this backbone")
        if layer in idf and idf[layer].shape != (coder.d_sae,):
            sizes = f"idf of layer {layer} has {len(idf[layer])} entries, but its SAE has {coder.d_sae} features"
            raise ModelError(where + sizes)
    if config is not None and config.idf == "corpus" and (missing := sorted(set(saes) - set(idf))):
        raise ModelError(f"{where}the SAE of layer {missing[0]} was saved without idf; set grounding.idf to dialogue")
    return saes
