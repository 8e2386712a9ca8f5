"""Real backbones with small random SAEs on what is short, empty, odd or wrong."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import strip_markers

from remind.core.errors import ModelError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.codes import Part, token_places
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Rendered, Segment, Strategy, render
from tests.grounding.conftest import random_states, saes_for, state_of

BACKBONES = ("minilm", "nano")


@cache
def backbone(name: str) -> Backbone:
    return load_backbone(name)


def grounder(name: str, **chosen) -> Grounder:
    config = GroundingConfig(**{"budget_share": 0.6, "window": 0, **chosen})
    return Grounder(backbone(name), saes_for(backbone(name), (1, 3), k=24), None, config)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("mode", ["joint", "windowed"])
def test_results_depend_neither_on_batch_size_nor_on_the_caches(name: str, mode) -> None:
    states = [state_of(), state_of(Strategy(("Look for a red bicycle.",), entities=("park",)), (Segment(1, 7),))]
    settings = {"context_codes": mode, "window_tokens": 12}
    plain = [grounder(name, **settings).ground(one) for one in states]
    for expected, one in zip(plain, states, strict=True):
        assert expected.blocks
        other = grounder(name, **settings, batch_size=3).ground(one)
        assert other.salience == pytest.approx(expected.salience, rel=1e-4, abs=1e-4)
        assert other.blocks == expected.blocks
    for cached in (0, 2):
        used = grounder(name, **settings, cached_dialogues=cached)
        assert [used.ground(states[n]) for n in (0, 1, 1, 0)] == [plain[n] for n in (0, 1, 1, 0)]


@pytest.mark.parametrize("name", BACKBONES)
def test_hidden_states_that_are_not_finite_are_a_model_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, original = grounder(name), Backbone.hidden_states

    def broken(self: Backbone, *args, **named):
        return {layer: states * float("nan") for layer, states in original(self, *args, **named).items()}

    monkeypatch.setattr(Backbone, "hidden_states", broken)
    with pytest.raises(ModelError, match="not finite"):
        one.ground(state_of())


@pytest.mark.parametrize("name", BACKBONES)
def test_silent_turns_and_empty_strategies(name: str) -> None:
    def said(*texts: str) -> FactualState:
        turns = tuple(Turn(str(n), ("Ana", "Ben")[n % 2], text) for n, text in enumerate(texts))
        target, everything = Dialogue("d", (Session("s", None, turns),)), (Segment(0, len(turns) - 1),)
        return FactualState(target, Question("q", "d", "What?"), everything, Strategy(("Look for a bicycle.",)))

    whole = grounder(name, budget_share=1.0)
    x1 = whole.ground(said("My bicycle is gone.", "\n\n", "It was red.", "Ben: and Ana: were here"))
    assert [n for n, value in enumerate(x1.salience) if value == -math.inf] == [1]
    assert x1.blocks == ((0, 0), (2, 3))
    # in the window of another it is marked with it
    wide = grounder(name, budget_share=1.0, window=1)
    assert wide.ground(said("My bicycle is gone.", "", "It was red.")).blocks == ((0, 2),)
    alone = whole.ground(said(""))
    assert (alone.salience, alone.blocks) == ((-math.inf,), ())
    nothing = whole.ground(state_of(Strategy(("",), scope=(" \n",))))
    assert (nothing.blocks, len(nothing.salience)) == ((), 9)


@settings(max_examples=40)
@given(
    random_states(),
    st.sampled_from([("nano", "joint"), ("nano", "windowed"), ("minilm", "windowed")]),
    st.integers(0, 2),
    st.sampled_from([{"budget_share": 0.4}, {"budget_share": 1.0}, {"threshold": 0.0}]),
)
def test_any_dialogue(one: FactualState, where: tuple[str, str], window: int, chosen: dict) -> None:
    trace = grounder(where[0], context_codes=where[1], window=window, **chosen).trace(one)
    before, after = render(one), render(trace.state)
    assert strip_markers(after) == before.text[slice(*before.dialogue)]
    assert len(trace.state.salience) == len(one.turns)
    assert not any(math.isnan(value) for value in trace.state.salience)
    for first, last in trace.state.blocks:
        assert len(set(one.runs[first : last + 1])) == 1
    if trace.budget is not None:
        assert sum(int(trace.codes.turn_tokens[a : b + 1].sum()) for a, b in trace.state.blocks) <= trace.budget


def where(rendered: Rendered, state: FactualState, position: int) -> tuple[int, Part]:
    """Turn and part of one character, span by span."""
    for index, (span, turn) in enumerate(zip(rendered.turns, state.turns, strict=True)):
        if span.start <= position < span.end:
            if span.speaker[0] <= position < span.speaker[1]:
                return index, Part.SPEAKER
            if span.text[0] <= position < span.text[1]:
                return index, Part.TEXT
            for (start, end), image in zip(span.captions, turn.images, strict=True):
                if start <= position < end and image.caption and image.caption.split():
                    return index, Part.CAPTION
            return index, Part.OTHER
    for part, spans in ((Part.REASONING, rendered.reasoning), (Part.ANCHOR, rendered.anchors)):
        if any(start <= position < end for start, end in spans):
            return -1, part
    return -1, Part.OTHER


@pytest.mark.parametrize("name", BACKBONES)
@settings(max_examples=60)
@given(state=random_states())
def test_a_token_stands_where_its_first_visible_character_does(name: str, state: FactualState) -> None:
    rendered = render(state)
    tokens = backbone(name).tokenize(rendered.text)
    turn, part = token_places(rendered, state.turns, tokens.offsets)
    for (start, end), index, kind in zip(tokens.offsets, turn.tolist(), part.tolist(), strict=True):
        position = next((p for p in range(start, end) if not rendered.text[p].isspace()), start)
        assert (index, kind) == where(rendered, state, position)
