"""Guidance features taken out of the residual stream at some turns' tokens while the model reads the prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.faithfulness.logprob import check_length, logprobs
from remind.core.errors import ModelError
from remind.grounding.codes import SparseEncoder, first_character, turn_idf
from remind.grounding.config import GroundingConfig
from remind.grounding.resonance import guidance
from remind.states.pyramid import Rendered, Span
from remind.viewing.turns import Prompt
from sae import SAEError, SparseCodes, TopKSAE
from sae.probe import ablate

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def guidance_features(
    encoder: SparseEncoder, rendered: Rendered, config: GroundingConfig, idf: Mapping[int, Tensor], n: int | None = None
) -> dict[int, list[int]]:
    """The features with the largest weight in v_guide (Eq. 3), by layer, falling; none of weight 0.

    Codes come from one forward of the x0 prompt up to the end of the strategy, as in joint grounding.

    Args:
        encoder: backbone and SAEs that give the codes.
        rendered: x0.
        config: α, whether anchors are weighted by idf, and which idf.
        idf: of the SAEs' corpus, by layer; where incomplete `auto` counts over the prompt's turns.
        n: features per layer at most; None: all.

    Raises:
        ModelError: longer than the backbone takes, or idf of the corpus asked for but missing.
    """
    tokens = encoder.backbone.tokenize(rendered.text)
    # nothing behind the strategy is read; offsets ascend, so a cut keeps a prefix
    end = rendered.strategy_end - 1
    length = sum(start < end for start, _ in tokens.offsets)
    if not length:
        return {layer: [] for layer in encoder.saes}
    first = torch.tensor([first_character(rendered.text, span) for span in tokens.offsets[:length]])
    codes = encoder.encode([tokens.ids[:length]])
    corpus = config.idf == "corpus" or (config.idf == "auto" and set(encoder.saes) <= set(idf))
    features = {}
    for layer, values in codes.items():
        if corpus and layer not in idf:
            raise ModelError(
                f"the SAE of layer {layer} was saved without idf; build states with grounding.idf dialogue"
            )
        weights = idf[layer].cpu().float() if corpus else _idf(values, rendered, first, encoder.saes[layer].d_sae)
        reason, anchors = (values[_inside(first, spans)] for spans in (rendered.reasoning, rendered.anchors))
        v = guidance(reason, anchors, weights, config.alpha, anchor_idf=config.anchor_idf)
        order = v.argsort(descending=True, stable=True)[: n if n is not None else len(v)]
        features[layer] = [int(feature) for feature in order if v[feature] > 0]
    return features


def _idf(codes: SparseCodes, rendered: Rendered, first: Tensor, d_sae: int) -> Tensor:
    """w_idf with the prompt's turns as documents."""
    ends = torch.tensor([turn.end for turn in rendered.turns] or [0])
    turn = torch.searchsorted(ends, first, right=True).clamp(max=max(len(rendered.turns) - 1, 0))
    inside = _inside(first, [(t.start, t.end) for t in rendered.turns])
    return turn_idf(codes[inside], turn[inside], d_sae)


def _inside(first: Tensor, spans: Sequence[Span]) -> Tensor:
    """Which characters lie in one of the spans; bool [T] as indices [n]."""
    mask = torch.zeros(len(first), dtype=torch.bool)
    for start, end in spans:
        mask |= (first >= start) & (first < end)
    return mask.nonzero().squeeze(-1)


@torch.no_grad()
def ablated_logprob(
    backbone: Backbone,
    saes: Mapping[int, TopKSAE],
    features: Mapping[int, Collection[int]],
    prompt: Prompt,
    turns: Collection[int],
    target_ids: Sequence[int],
) -> Tensor:
    """`answer_logprob` while features are held at 0 on the tokens of some turns (`sae.probe.ablate`).

    The tokens themselves stay. Attention sinks among them are edited like any other token.

    Args:
        saes: by layer of `backbone`, on its device.
        features: by layer; a layer without any is left alone.
        prompt: from `prompt_of`.
        turns: indices into its turns.
        target_ids: [L].

    Returns:
        [L] on the CPU.

    Raises:
        DataError: longer than the model takes.
        ModelError: SAEs that do not fit the model.
    """
    check_length(backbone, len(prompt.ids), len(target_ids))
    inputs = {"input_ids": torch.tensor([[*prompt.ids, *target_ids[:-1]]])}
    chosen = {layer: ids for layer, ids in features.items() if ids}
    if not chosen:
        return logprobs(backbone, inputs, target_ids)[0].cpu()
    edited = torch.zeros(inputs["input_ids"].shape[1], dtype=torch.bool)
    edited[: len(prompt.ids)] = torch.isin(prompt.turn, torch.tensor(sorted(turns), dtype=torch.int64))
    edited = edited.to(backbone.device)
    try:
        with ablate(backbone.model, saes, chosen, positions=lambda at: edited[at]):
            return logprobs(backbone, inputs, target_ids)[0].cpu()
    except SAEError as error:
        raise ModelError(f"{backbone.name}: {error}") from None
