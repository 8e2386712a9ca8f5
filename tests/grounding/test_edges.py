"""Real backbones with small random SAEs on what is short, empty, odd or wrong."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import strip_markers

from remind.grounding import Grounder, GroundingConfig
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy, render
from tests.grounding.conftest import random_states, saes_for, state_of

BACKBONES = ("minilm", "nano")


@cache
def backbone(name: str) -> Backbone:
    return load_backbone(name)


def grounder(name: str, **chosen) -> Grounder:
    config = GroundingConfig(**{"budget_share": 0.6, "window": 0, **chosen})
    return Grounder(backbone(name), saes_for(backbone(name), (1, 3), k=24), None, config)


@pytest.mark.parametrize("mode", ["joint", "windowed"])
def test_results_depend_neither_on_batch_size_nor_on_the_caches(mode) -> None:
    states = [state_of(), state_of(Strategy(("Look for a red bicycle.",), entities=("park",)), (Segment(1, 7),))]
    settings = {"context_codes": mode, "window_tokens": 12}
    plain = [grounder("nano", **settings).ground(one) for one in states]
    other = grounder("nano", **settings, batch_size=3).ground(states[0])
    assert other.salience == pytest.approx(plain[0].salience, rel=1e-4, abs=1e-4)
    used = grounder("nano", **settings, cached_dialogues=2)
    assert [used.ground(states[n]) for n in (0, 1, 1, 0)] == [plain[n] for n in (0, 1, 1, 0)]


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
