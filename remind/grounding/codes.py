"""Sparse codes of a factual state, token by token, and their source in one forward of its prompt (`joint`)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from remind.grounding.encode import SparseEncoder, split_codes, turn_idf
from remind.grounding.places import Part, token_places
from remind.models.pictures import Pictures, Place, places_of
from remind.states.pyramid import FactualState, Span, render
from remind.states.records import pictures_of
from sae import SparseCodes


@dataclass(frozen=True)
class LayerCodes:
    """One layer's codes of a state, on the CPU.

    Attributes:
        dialogue: [T, k], tokens of the retrieved turns.
        reasoning, anchors: [·, k], tokens of C_reason and E_anchor.
        idf: float32 [d_sae], counted over the turns at hand.
    """

    dialogue: SparseCodes
    reasoning: SparseCodes
    anchors: SparseCodes
    idf: Tensor


@dataclass(frozen=True)
class StateCodes:
    """Codes of a state and where its T dialogue tokens stand; strategy and headers are not among them.

    Attributes:
        text: the prompt of x0.
        spans: characters of each token in `text`.
        turn: int64 [T], index into `FactualState.turns`, ascending.
        part: int64 [T], `Part`.
        turn_tokens: int64 [n_turns].
        layers: by layer number.
    """

    text: str
    spans: tuple[Span, ...]
    turn: Tensor
    part: Tensor
    turn_tokens: Tensor
    layers: dict[int, LayerCodes]

    def speakers(self, layer: int) -> list[SparseCodes]:
        """For each turn the codes of its speaker-marker tokens P_k."""
        marked = (self.part == Part.SPEAKER).nonzero().squeeze(-1)
        sizes = torch.bincount(self.turn[marked], minlength=len(self.turn_tokens)).tolist()
        return split_codes(self.layers[layer].dialogue[marked], sizes)


def joint_codes(encoder: SparseEncoder, state: FactualState, pictures: Pictures | None = None) -> StateCodes:
    """One forward of the x0 prompt up to the end of the strategy, as the strategy stands after the dialogue.

    Idf is counted over the retrieved turns.

    Args:
        pictures: show images that have a file as pixels, in place of their captions; their tokens are of part CAPTION.

    Raises:
        ModelError: the prompt is longer than the model takes. ImagePathError: an image that cannot be used.
    """
    rendered, question = render(state), state.question.id
    places: tuple[Place, ...] = ()
    pixels: dict[str, Tensor] = {}
    if pictures is not None:
        places = places_of(rendered, pictures_of(state.turns), question, "x0")
    if pictures is None or not places:
        tokens = encoder.backbone.tokenize(rendered.text)
        turn, part = token_places(rendered, state.turns, tokens.offsets)
    else:
        pixels = pictures.tensors([place.path for place in places], question)
        tokens = pictures.tokens(encoder.backbone.tokenizer, rendered.text, places)
        turn, part = token_places(rendered, state.turns, tokens.offsets)
        ids, config = torch.tensor(tokens.ids), encoder.backbone.model.config
        part[ids == config.image_token_id] = Part.CAPTION
        part[(ids == config.vision_start_token_id) | (ids == config.vision_end_token_id)] = Part.OTHER
    # nothing behind the strategy is read; offsets ascend, so a cut keeps a prefix
    length = bisect_left(tokens.offsets, rendered.strategy[1], key=lambda span: span[0])
    turn, part = turn[:length], part[:length]
    codes = encoder.encode([tokens.ids[:length]] if length else [], pixels)
    inside = (turn >= 0).nonzero().squeeze(-1)
    layers = {}
    for layer, found in codes.items():
        dialogue = found[inside]
        layers[layer] = LayerCodes(
            dialogue=dialogue,
            reasoning=found[(part == Part.REASONING).nonzero().squeeze(-1)],
            anchors=found[(part == Part.ANCHOR).nonzero().squeeze(-1)],
            idf=turn_idf(dialogue, turn[inside], encoder.saes[layer].d_sae),
        )
    return StateCodes(
        text=rendered.text,
        spans=tuple(tokens.offsets[position] for position in inside.tolist()),
        turn=turn[inside],
        part=part[inside],
        turn_tokens=torch.bincount(turn[inside], minlength=len(state.turns)),
        layers=layers,
    )
