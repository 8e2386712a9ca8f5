"""Grounding of whole states, against hidden states read straight from the model and equations in dense float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from remind.core.errors import ConfigError, ModelError
from remind.data.dialogue import Turn
from remind.grounding import Grounder, GroundingConfig, gaussian_smooth
from remind.grounding.codes import Part
from remind.models.backbone import Backbone
from remind.states.pyramid import FactualState, Rendered, Segment, Strategy, render
from sae import TopKSAE
from tests.grounding.conftest import saes_for, state_of

D_SAE, K = 96, 6


def hidden(backbone: Backbone, text: str, layer: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """[T, d] of a text on its own, by the model's own output, and the tokens' offsets; special tokens cut off."""
    encoded = backbone.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    with torch.no_grad():
        out = backbone.model(torch.tensor([encoded["input_ids"]]), output_hidden_states=True)
    plain = [t for t, special in enumerate(encoded["special_tokens_mask"]) if not special]
    return out.hidden_states[layer][0][plain], [encoded["offset_mapping"][t] for t in plain]


def dense(coder: TopKSAE, states: Tensor) -> Tensor:
    """Eq. 2 without any sparse layout, float64 [T, d_sae]."""
    coder = copy.deepcopy(coder).requires_grad_(False)
    pre = ((states.double() - coder.b_dec.double()) @ coder.W_enc.double() + coder.b_enc.double()).relu()
    floor = pre.topk(coder.k, dim=-1).values[:, -1:]
    return torch.where(pre >= floor, pre, 0.0)


def reference(
    state: FactualState,
    codes: Tensor,
    places: list[tuple[int, Part]],
    reason: Tensor,
    anchors: Tensor,
    idf: Tensor,
    config: GroundingConfig,
) -> list[float]:
    """r_t of Eq. 3 and 4 in dense float64, for tokens that stand in turns."""
    counts = (reason > 0).sum(0), (anchors > 0).sum(0)
    v = torch.maximum(idf * counts[0], config.alpha * counts[1] * (idf if config.anchor_idf else 1.0))
    runs, b = state.runs, []
    for k in range(len(state.turns)):
        marker = [codes[t] > 0 for t, place in enumerate(places) if place == (k, Part.SPEAKER)]
        b.append(float((v * torch.stack(marker).any(0)).sum()))
    r = []
    for t, (k, _) in enumerate(places):
        reply = b[k + 1] if k + 1 < len(b) and runs[k + 1] == runs[k] else 0.0
        r.append(float(codes[t] @ v) + config.beta * (b[k] + reply))
    return r


def place(rendered: Rendered, turns: Sequence[Turn], position: int) -> tuple[int, Part] | None:
    """The turn and part of a character; None outside of turns."""
    for n, (span, turn) in enumerate(zip(rendered.turns, turns, strict=True)):
        captions = [at for at, image in zip(span.captions, turn.images, strict=True) if image.caption]
        parts = [(Part.SPEAKER, span.speaker), (Part.TEXT, span.text), *((Part.CAPTION, at) for at in captions)]
        if span.start <= position < span.end:
            return n, next((part for part, (start, end) in parts if start <= position < end), Part.OTHER)
    return None


def first_characters(text: str, offsets: Sequence[tuple[int, int]], start: int = 0) -> list[int]:
    """Where each token's first character stands that is not white space."""
    return [next((p for p in range(start + a, start + b) if not text[p].isspace()), start + a) for a, b in offsets]


def idf_of(codes: Tensor, document: list[int]) -> Tensor:
    active = [(codes[[t for t, d in enumerate(document) if d == n]] > 0).any(0) for n in sorted(set(document))]
    return torch.log((1 + len(active)) / (1 + torch.stack(active).sum(0).double()))


@pytest.mark.parametrize("anchor_idf", [True, False])
def test_windowed_is_the_equations_on_each_session_alone(minilm: Backbone, anchor_idf: bool) -> None:
    config = GroundingConfig(anchor_idf=anchor_idf, sigma=0.0, beta_unit=None)
    coder = saes_for(minilm, (4,))
    state = state_of()
    trace = Grounder(minilm, coder, None, config).trace(state)

    rendered = render(FactualState(state.dialogue, state.question, (Segment(0, 5), Segment(6, 9)), Strategy(())))
    rows, found = [], []
    for first, last in ((0, 5), (6, 9)):
        start = rendered.turns[first].start
        states, offsets = hidden(minilm, rendered.text[start : rendered.turns[last].end], 4)
        rows.append(dense(coder[4], states))
        for position in first_characters(rendered.text, offsets, start):
            found.append(place(rendered, state.dialogue.turns, position))
    every = torch.cat(rows)
    idf = idf_of(every, [turn for turn, _ in found])
    kept = [t for t, (turn, _) in enumerate(found) if turn in state.positions]
    places = [(state.positions.index(found[t][0]), found[t][1]) for t in kept]
    reason = dense(coder[4], hidden(minilm, "Look for things that were lost.", 4)[0])
    anchors = torch.cat([dense(coder[4], hidden(minilm, text, 4)[0]) for text in ("Ana", "bicycle", "station")])
    expected = reference(state, every[kept], places, reason, anchors, idf, config)
    assert trace.combined.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert [*zip(trace.codes.turn.tolist(), trace.codes.part.tolist(), strict=True)] == places
    assert trace.codes.turn_tokens.tolist() == [sum(k == turn for k, _ in places) for turn in range(len(state.turns))]


def test_joint_is_a_full_forward_of_the_prompt(nano: Backbone) -> None:
    config = GroundingConfig(sigma=1.5, beta_unit=None, agg="top5")
    coders = saes_for(nano, (1, 3))
    state = state_of()
    trace = Grounder(nano, coders, None, config).trace(state)
    rendered = render(state)
    combined = []
    for layer, coder in coders.items():
        states, offsets = hidden(nano, rendered.text, layer)
        codes = dense(coder, states)
        places, kept, strategy = [], [], {Part.REASONING: [], Part.ANCHOR: []}
        for t, position in enumerate(first_characters(rendered.text, offsets)):
            if (found := place(rendered, state.turns, position)) is not None:
                places.append(found)
                kept.append(t)
            for part, spans in ((Part.REASONING, rendered.reasoning), (Part.ANCHOR, rendered.anchors)):
                if any(s <= position < e for s, e in spans):
                    strategy[part].append(t)
        idf = idf_of(codes[kept], [n for n, _ in places])
        expected = reference(
            state, codes[kept], places, codes[strategy[Part.REASONING]], codes[strategy[Part.ANCHOR]], idf, config
        )
        assert trace.resonance[layer].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-3)
        r = torch.tensor(expected)
        combined.append((r - r.mean()) / r.std(correction=0))
        torch.testing.assert_close(
            trace.codes.layers[layer].dialogue.dense(D_SAE), codes[kept].float(), rtol=1e-4, atol=1e-4
        )
    r = sum(combined) / 2
    torch.testing.assert_close(trace.combined, r, rtol=1e-3, atol=1e-3)
    runs = torch.tensor([state.runs[n] for n, _ in places])
    assert len(runs.unique()) == 3
    smoothed = torch.cat([gaussian_smooth(r[runs == run], 1.5) for run in runs.unique()])
    torch.testing.assert_close(trace.smoothed, smoothed, rtol=1e-3, atol=1e-3)
    for turn, salience in enumerate(trace.state.salience):
        best = {
            part: sorted(s for s, place in zip(smoothed.tolist(), places, strict=True) if place == (turn, part))[-5:]
            for part in (Part.TEXT, Part.CAPTION)
        }
        means = [sum(values) / len(values) for values in best.values() if values]
        expected = 0.7 * means[0] + 0.3 * means[-1] if means else -math.inf
        assert salience == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_what_does_not_fit_is_a_model_error(minilm: Backbone) -> None:
    with pytest.raises(ConfigError, match="aggregate"):
        GroundingConfig(agg="top0")
    fits = TopKSAE(384, 96, 4)
    for saes, idf, settings, message in (
        ({}, None, {}, "at least one SAE"),
        ({7: TopKSAE(384, 64, 4)}, None, {}, "layers 0 to 6"),
        ({3: TopKSAE(128, 64, 4)}, None, {}, "384 wide"),
        ({3: fits}, {3: torch.ones(5)}, {}, "96 features"),
        ({3: fits}, {2: torch.ones(96)}, {"idf": "corpus"}, "without idf"),
        ({3: fits}, None, {"context_codes": "joint"}, "windowed"),
    ):
        with pytest.raises(ModelError, match=message):
            grounder = Grounder(minilm, saes, idf, GroundingConfig(**settings))  # type: ignore[arg-type]
            grounder.ground(state_of(Strategy(("a cue " * 600,))))
