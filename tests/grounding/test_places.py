"""Tokens to turns and parts by character offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from remind.grounding.places import Part, token_places
from remind.models.backbone import Backbone
from remind.states.pyramid import FactualState, Rendered, render
from tests.grounding.conftest import random_states


@pytest.fixture(params=["minilm", "nano"], scope="module")
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return request.getfixturevalue(request.param)


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


@settings(max_examples=60)
@given(state=random_states())
def test_a_token_stands_where_its_first_visible_character_does(backbone: Backbone, state: FactualState) -> None:
    rendered = render(state)
    tokens = backbone.tokenize(rendered.text)
    turn, part = token_places(rendered, state.turns, tokens.offsets)
    for (start, end), index, kind in zip(tokens.offsets, turn.tolist(), part.tolist(), strict=True):
        position = next((p for p in range(start, end) if not rendered.text[p].isspace()), start)
        assert (index, kind) == where(rendered, state, position)
