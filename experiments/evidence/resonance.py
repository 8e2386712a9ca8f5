"""Resonance of every turn for many questions at once: what `Grounder` computes one question at a time.

Held to `Grounder` by a test; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remind.data.dialogue import Dialogue
from remind.grounding.codes import DialogueCodes, Part, SparseEncoder
from remind.grounding.config import GroundingConfig
from remind.grounding.fusion import best_partners, match_each, question_codes
from remind.grounding.resonance import smooth_runs, standardise_turns, turn_salience
from remind.states.pyramid import Strategy
from sae import SparseCodes


@dataclass(frozen=True)
class QuestionCodes:
    """Codes of a dialogue and of the questions about it.

    Attributes:
        anchors: layer to codes [tokens, k] of the questions' content tokens; owner: int64 [tokens], their question.
        reasons: layer to how many reasoning tokens of each question have each feature, float32 [d_sae, Q].
    """

    dialogue: DialogueCodes
    n_turns: int
    anchors: dict[int, SparseCodes]
    owner: Tensor
    reasons: dict[int, Tensor]

    @property
    def questions(self) -> int:
        return next(iter(self.reasons.values())).shape[1]


def encode_questions(
    encoder: SparseEncoder,
    codes: DialogueCodes,
    dialogue: Dialogue,
    texts: Sequence[str],
    strategies: Sequence[Strategy],
) -> QuestionCodes:
    """Codes of the questions' own words and of their reasoning cues, each cue on its own and only once."""
    anchors, owner = question_codes(encoder, dialogue, texts)
    cues = list(dict.fromkeys(cue for strategy in strategies for cue in strategy.reasoning))
    ids = [encoder.backbone.tokenize(cue).ids for cue in cues]
    found = encoder.encode([one for one in ids if one])
    place = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(one) for one in ids], dtype=torch.int64))
    uses = torch.tensor([float(s.reasoning.count(cue)) for cue in cues for s in strategies])
    uses = uses.reshape(len(cues), len(strategies))
    reasons = {layer: _counts(found[layer], place, len(cues), len(codes.idf[layer])) @ uses for layer in codes.layers}
    return QuestionCodes(codes, len(dialogue.turns), anchors, owner, reasons)


def salience(asked: QuestionCodes, config: GroundingConfig, run: Tensor, layers: Sequence[int]) -> Tensor:
    """s_turn (Eq. 5, or `match_each`) of every turn for every question, before turns share with neighbours.

    Args:
        config: `match`, α, β, λ, σ, Agg and idf none are used; otherwise idf is the dialogue's.
        run: int64 [n, Q] or [n, 1]; -1: not at hand.
        layers: which layers' codes count.

    Returns:
        float32 [n, Q]; -inf for turns without tokens. Of no meaning where run is -1.
    """
    codes = asked.dialogue
    whole = run.expand(-1, asked.questions)
    inside = whole >= 0
    spoken = (codes.part == Part.TEXT) | (codes.part == Part.CAPTION)
    counted = torch.where(spoken, codes.turn, -1)
    there = torch.bincount(counted[counted >= 0], minlength=asked.n_turns) > 0
    if config.match == "each":
        at_hand = inside & there[:, None]
        found = []
        for layer in layers:
            partners = best_partners(
                codes.layers[layer], counted, asked.n_turns, asked.anchors[layer], _idf(codes, layer, config)
            )
            found.append(match_each(partners, asked.owner, at_hand))
        joined = found[0] if len(found) == 1 else torch.stack([standardise_turns(s, at_hand) for s in found]).mean(0)
        return torch.where(there[:, None], joined, -torch.inf)
    tokens_inside = inside[codes.turn]
    parts = [_token_resonance(asked, layer, config, whole, tokens_inside) for layer in layers]
    return turn_scores(asked, config, whole, parts)


def turn_scores(asked: QuestionCodes, config: GroundingConfig, run: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """From scores of tokens [T, Q], one a layer, to one per turn (Eq. 5); float32 [n, Q].

    Args:
        run: int64 [n, Q].
    """
    codes = asked.dialogue
    tokens_inside = (run >= 0)[codes.turn]
    spoken = (codes.part == Part.TEXT) | (codes.part == Part.CAPTION)
    if len(parts) > 1:
        parts = [torch.stack([standardise_turns(r, tokens_inside) for r in parts]).mean(0)]
    counted, captions = torch.where(spoken, codes.turn, -1), codes.part == Part.CAPTION
    columns = []
    for r, runs in zip(parts[0].T, run[codes.turn].T, strict=True):
        smoothed = smooth_runs(r.contiguous(), runs, config.sigma)
        columns.append(turn_salience(smoothed, counted, captions, asked.n_turns, config.lam, config.agg))
    return torch.stack(columns, 1)


def _idf(codes: DialogueCodes, layer: int, config: GroundingConfig) -> Tensor:
    return torch.ones_like(codes.idf[layer]) if config.idf == "none" else codes.idf[layer]


def _counts(codes: SparseCodes, owner: Tensor, n: int, d_sae: int) -> Tensor:
    """Tokens of each owner in which each feature is active, float32 [d_sae, n]."""
    active = codes.values > 0
    pairs = codes.indices[active] * n + owner[:, None].expand_as(codes.indices)[active]
    return torch.bincount(pairs, minlength=d_sae * n).reshape(d_sae, n).float()


def _token_resonance(
    asked: QuestionCodes, layer: int, config: GroundingConfig, run: Tensor, tokens_inside: Tensor
) -> Tensor:
    """Eq. 3 and 4, [T, Q]."""
    codes, idf = asked.dialogue.layers[layer], _idf(asked.dialogue, layer, config)[:, None]
    anchors = config.alpha * _counts(asked.anchors[layer], asked.owner, asked.questions, len(idf))
    v = torch.maximum(idf * asked.reasons[layer], anchors * idf if config.anchor_idf else anchors)
    active = codes.values > 0
    values = torch.where(active, codes.values.float(), 0.0)
    indices = torch.where(active, codes.indices, 0)
    local = F.embedding_bag(indices, v, per_sample_weights=values, mode="sum")
    # b_k: each feature of a turn's speaker marker once
    marked = (asked.dialogue.part == Part.SPEAKER)[:, None] & active
    pairs = (asked.dialogue.turn[:, None] * len(idf) + codes.indices)[marked].unique()
    b = torch.zeros(asked.n_turns, asked.questions).index_add_(0, pairs // len(idf), v[pairs % len(idf)])
    received = b.clone()
    received[:-1] += torch.where((run[1:] == run[:-1]) & (run[1:] >= 0), b[1:], 0.0)
    beta = torch.full((asked.questions,), config.beta)
    if config.beta_unit is not None:
        weight = tokens_inside.float()
        total, count = values.sum(-1) @ weight, active.sum(-1).float() @ weight
        beta = torch.where(count > 0, beta * config.beta_unit * total / count.clamp(min=1), beta)
    return local + (beta * received)[asked.dialogue.turn]
