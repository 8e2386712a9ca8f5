"""Real backbones with small random SAEs on what is short, empty, odd or wrong."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remind.core.errors import ModelError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig, GroundingTrace, select_blocks
from remind.grounding.codes import Part, token_places
from remind.models.backbone import Backbone, load_backbone
from remind.states import prompts
from remind.states.pyramid import (
    MARKER,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Rendered,
    Segment,
    Strategy,
    render,
    strip_markers,
)
from tests.grounding.conftest import random_states, saes_for

BACKBONES = ("minilm", "nano")
STRATEGY = Strategy(("Look for things that were lost.",), speakers=("Ann",), entities=("bicycle",))
LINES = (
    ("Anna", "My bicycle was stolen on Tuesday."),
    ("Ann", "That is bad news. Did you lock it?"),
    ("Anna", "Of course, at the station."),
    ("Ann", "I saw a red bicycle in the park."),
    ("Anna", "Then let us go and look for it."),
)


@cache
def backbone(name: str) -> Backbone:
    return load_backbone(name)


def grounder(name: str, **chosen) -> Grounder:
    return Grounder(
        backbone(name),
        saes_for(backbone(name), (1, 3), k=24),
        None,
        GroundingConfig(**{"budget_share": 0.6, "window": 0, **chosen}),
    )


def state(
    lines: tuple[tuple[str, str], ...] = LINES,
    strategy: Strategy = STRATEGY,
    segments: tuple[Segment, ...] | None = None,
) -> FactualState:
    turns = tuple(Turn(str(n), speaker, text) for n, (speaker, text) in enumerate(lines))
    target = Dialogue("d", (Session("s", None, turns),))
    return FactualState(
        target, Question("q", "d", "What was lost?"), segments or (Segment(0, len(turns) - 1),), strategy
    )


def check_markers(x1: AttentionalState) -> None:
    """Markers pair up, hold whole turns of one run, and leave x0's dialogue byte for byte."""
    before, after, factual = render(x1.factual), render(x1), x1.factual
    section = before.text[slice(*before.dialogue)]
    assert strip_markers(after).encode() == section.encode()
    lines = after.text[slice(*after.dialogue)].split("\n")
    # by another route: cut the whole lines that are the marker, whatever the spans say
    assert "\n".join(line for line in lines if line != MARKER) == section
    assert lines.count(MARKER) == len(after.markers) == 2 * len(x1.blocks)
    marked: set[int] = set()
    for opened, closed in zip(after.markers[::2], after.markers[1::2], strict=True):
        inside = [n for n, turn in enumerate(after.turns) if opened[1] <= turn.start and turn.end <= closed[0]]
        # no header, no sign of a gap, no other marker
        text = "".join(after.text[after.turns[n].start : after.turns[n].end] for n in inside)
        assert text == after.text[opened[1] : closed[0]]
        assert len({factual.runs[n] for n in inside}) == 1
        assert len({id(factual.dialogue.session_of[factual.turns[n].id]) for n in inside}) == 1
        positions = [factual.positions[n] for n in inside]
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        assert not marked & set(inside)
        marked.update(inside)
    assert marked == {n for start, end in x1.blocks for n in range(start, end + 1)}
    summary = render(ReflectiveState(x1, "In short."))
    assert strip_markers(summary) == strip_markers(after)
    if not x1.blocks:
        assert after == before
        assert prompts.render("reminder", marker=MARKER).strip() not in summary.text


def assert_close(one: GroundingTrace, other: GroundingTrace) -> None:
    torch.testing.assert_close(one.smoothed, other.smoothed, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.tensor(one.state.salience), torch.tensor(other.state.salience), rtol=1e-4, atol=1e-4
    )
    assert one.state.blocks == other.state.blocks


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("mode", ["joint", "windowed"])
def test_results_depend_neither_on_batch_size_nor_on_the_caches(name: str, mode, tmp_path: Path) -> None:
    states = [state(), state(LINES[::-1], Strategy(("Look for a red bicycle.",), entities=("park",)))]
    settings = {"context_codes": mode, "window_tokens": 12}
    plain = [grounder(name, **settings).trace(one) for one in states]
    for expected, one in zip(plain, states, strict=True):
        assert expected.state.blocks
        assert_close(expected, grounder(name, **settings, batch_size=3).trace(one))
    for cached in (0, 2):
        used = grounder(name, **settings, cached_dialogues=cached, codes_folder=str(tmp_path))
        assert [used.trace(states[n]).state for n in (0, 1, 1, 0)] == [plain[n].state for n in (0, 1, 1, 0)]
    assert len(list(tmp_path.rglob("*.safetensors"))) == (2 if mode == "windowed" else 0)


@pytest.mark.parametrize("name", BACKBONES)
def test_hidden_states_that_are_not_finite_are_a_model_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, original = grounder(name), Backbone.hidden_states

    def broken(self: Backbone, *args, **named):
        return {layer: states * float("nan") for layer, states in original(self, *args, **named).items()}

    monkeypatch.setattr(Backbone, "hidden_states", broken)
    with pytest.raises(ModelError, match="not finite"):
        one.ground(state())


@pytest.mark.parametrize("name", BACKBONES)
def test_short_and_silent_turns(name: str) -> None:
    whole = grounder(name, budget_share=1.0)
    for blank in ("", "\n\n"):
        lines = (LINES[0], ("Ann", blank), *LINES[2:])
        x1 = whole.ground(state(lines))
        assert [n for n, value in enumerate(x1.salience) if value == -math.inf] == [1]
        assert x1.blocks == ((0, 0), (2, 4))
        check_markers(x1)
        # in the window of another it is marked with it
        assert grounder(name, budget_share=1.0, window=1).ground(state(lines)).blocks == ((0, 4),)
        alone = whole.ground(state((("Ann", blank),)))
        assert (alone.salience, alone.blocks) == ((-math.inf,), ())
    one = grounder(name, budget_share=1.0, window=3).ground(state(LINES[:1]))
    assert one.blocks == ((0, 0),)
    assert math.isfinite(one.salience[0])
    assert grounder(name, budget_share=0.5).ground(state(LINES[:1])).blocks == ()
    # every turn in a run of its own
    lines = tuple((speaker, f"{text} {n}") for n in range(5) for speaker, text in LINES)
    apart = tuple(Segment(n, n) for n in range(0, len(lines), 2))
    x1 = grounder(name, window=2, budget_share=1.0).ground(state(lines, segments=apart))
    assert x1.blocks == tuple((n, n) for n in range(len(apart)))
    check_markers(x1)
    short = state((("Ann", "Hi."), ("Anna", "Hello!")))
    wide, narrow = (grounder(name, context_codes="windowed", window_tokens=n).trace(short) for n in (256, 9))
    assert len(wide.state.salience) == 2
    if not backbone(name).causal:
        assert_close(wide, narrow)


@settings(max_examples=40)
@given(
    random_states(),
    st.sampled_from([("nano", "joint"), ("nano", "windowed"), ("minilm", "windowed")]),
    st.integers(0, 2),
    st.sampled_from([{"budget_share": 0.4}, {"budget_share": 1.0}, {"threshold": 0.0}]),
    st.lists(st.floats(-2, 2) | st.just(-math.inf), min_size=15, max_size=15),
)
@example(state(segments=(Segment(0, 1), Segment(3, 4))), ("nano", "joint"), 1, {"budget_share": 1.0}, [1.0] * 15)
def test_markers_on_any_dialogue(
    one: FactualState, where: tuple[str, str], window: int, chosen: dict, salience: list[float]
) -> None:
    trace = grounder(where[0], context_codes=where[1], window=window, **chosen).trace(one)
    check_markers(trace.state)
    assert len(trace.state.salience) == len(one.turns)
    assert not any(math.isnan(value) for value in trace.state.salience)
    if trace.budget is not None:
        assert sum(int(trace.codes.turn_tokens[a : b + 1].sum()) for a, b in trace.state.blocks) <= trace.budget
    n = len(one.turns)
    blocks = select_blocks(salience[:n], [1] * n, threshold=0.0, window=window, run=one.runs)
    check_markers(AttentionalState(one, tuple(blocks)))


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
