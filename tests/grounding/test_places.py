"""Tokens to turns and parts by character offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding.places import Part, first_character, token_places
from remind.models.backbone import Backbone
from remind.states.pyramid import FactualState, Rendered, Segment, Strategy, render
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


def test_a_leading_space_does_not_move_a_token() -> None:
    assert first_character("ab  cd", (2, 6)) == 4
    assert first_character("ab  cd", (2, 4)) == 2
    assert first_character("ab", (2, 2)) == 2


def test_parts_of_a_turn(backbone: Backbone) -> None:
    turn = Turn("1", "Ana", "look 😀", images=(Image(0, caption="a red bike"), Image(1)))
    state = FactualState(
        Dialogue("d", (Session("s", None, (turn,)),)), Question("q", "d", "?"), (Segment(0, 0),), Strategy(())
    )
    rendered = render(state)
    tokens = backbone.tokenize(rendered.text)
    places, part = token_places(rendered, state.turns, tokens.offsets)
    ends = {
        kind: {(s, e) for (s, e), p in zip(tokens.offsets, part.tolist(), strict=True) if p == kind} for kind in Part
    }

    def covered(kind: Part) -> str:
        spans = ends[kind]
        return rendered.text[min(s for s, _ in spans) : max(e for _, e in spans)].strip()

    assert covered(Part.SPEAKER) == "Ana:"
    assert covered(Part.TEXT) == "look 😀"
    assert covered(Part.CAPTION) == "a red bike"
    assert not ends[Part.REASONING]
    assert not ends[Part.ANCHOR]
    assert (places == 0).sum() < len(tokens.ids)
