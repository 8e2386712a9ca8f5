"""From salience to markers in the prompt: nothing of the dialogue changes, markers enclose blocks inside runs."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from remind.grounding import select_blocks
from remind.states import prompts
from remind.states.pyramid import MARKER, AttentionalState, FactualState, ReflectiveState, render, strip_markers
from tests.grounding.conftest import random_states


@st.composite
def grounded(draw: st.DrawFn) -> AttentionalState:
    """A random state with blocks selected by random salience."""
    state = draw(random_states())
    n = len(state.turns)
    salience = [draw(st.floats(-2, 2) | st.just(-math.inf)) for _ in range(n)]
    limit = {"budget": draw(st.integers(0, n))} if draw(st.booleans()) else {"threshold": draw(st.floats(-2, 2))}
    blocks = select_blocks(salience, [1] * n, **limit, window=draw(st.integers(0, 2)), run=state.runs)
    return AttentionalState(state, tuple(blocks))


@given(grounded())
def test_without_marker_lines_the_dialogue_is_that_of_x0(state: AttentionalState) -> None:
    x0, x1 = render(state.factual), render(state)
    section = x0.text[slice(*x0.dialogue)].encode()
    assert strip_markers(x1).encode() == section
    # by another route: cut the whole lines that are the marker, whatever the spans say
    lines = x1.text[slice(*x1.dialogue)].encode().split(b"\n")
    assert b"\n".join(line for line in lines if line != MARKER.encode()) == section
    assert lines.count(MARKER.encode()) == 2 * len(state.blocks) == len(x1.markers)


@given(grounded())
def test_markers_alternate_and_never_cross_a_gap(state: AttentionalState) -> None:
    x1, factual = render(state), state.factual
    assert [x1.text[slice(*span)] for span in x1.markers] == [f"{MARKER}\n"] * len(x1.markers)
    edges = [edge for span in x1.markers for edge in span]
    assert edges == sorted(edges)
    inside_any: set[int] = set()
    for opened, closed in zip(x1.markers[::2], x1.markers[1::2], strict=True):
        inside = [n for n, turn in enumerate(x1.turns) if opened[1] <= turn.start and turn.end <= closed[0]]
        # a pair holds whole turns of one run and nothing else: no header, no sign of a gap, no other marker
        assert "".join(x1.text[x1.turns[n].start : x1.turns[n].end] for n in inside) == x1.text[opened[1] : closed[0]]
        assert len({factual.runs[n] for n in inside}) == 1
        positions = [factual.positions[n] for n in inside]
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        assert len({id(factual.dialogue.session_of[factual.turns[n].id]) for n in inside}) == 1
        inside_any.update(inside)
    assert inside_any == {n for start, end in state.blocks for n in range(start, end + 1)}


@given(random_states())
def test_without_blocks_x1_is_x0(state: FactualState) -> None:
    x0, x1 = render(state), render(AttentionalState(state, ()))
    assert x1 == x0
    reflected = render(ReflectiveState(AttentionalState(state, ()), "In short."))
    assert prompts.render("reminder", marker=MARKER).strip() not in reflected.text
