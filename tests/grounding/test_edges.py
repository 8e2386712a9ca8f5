"""Real backbones with small random SAEs on what is short, empty, odd or wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remind.core.errors import ModelError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.grounding.places import Part
from remind.grounding.windowed import WindowedCodes
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.states.pyramid import (
    MARKER,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Strategy,
    render,
    strip_markers,
)
from sae import TopKSAE
from tests.grounding.conftest import random_states

D_SAE, K = 96, 6
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


@cache
def coders(name: str, layers: tuple[int, ...] = (1, 3)) -> dict[int, TopKSAE]:
    width = backbone(name).hidden_size
    return {
        n: TopKSAE(width, D_SAE, K, generator=torch.Generator().manual_seed(n)).requires_grad_(False) for n in layers
    }


def grounder(name: str, **chosen) -> Grounder:
    return Grounder(backbone(name), coders(name), None, GroundingConfig(**{"budget_share": 0.6, "window": 0, **chosen}))


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
    before, after = render(x1.factual), render(x1)
    assert strip_markers(after).encode() == before.text[slice(*before.dialogue)].encode()
    lines = after.text[slice(*after.dialogue)].split("\n")
    assert lines.count(MARKER) == len(after.markers) == 2 * len(x1.blocks)
    opened = False
    for line in lines:
        if line == MARKER:
            opened = not opened
        # what stands for a gap is outside of every pair; a dialogue line begins with its speaker or an image label
        assert not (opened and (line == "[…]" or line.startswith("[Session ")))
    assert not opened
    held = []
    for start, end in x1.blocks:
        run = {x1.factual.runs[turn] for turn in range(start, end + 1)}
        assert len(run) == 1
        positions = x1.factual.positions[start : end + 1]
        assert list(positions) == list(range(positions[0], positions[0] + len(positions)))
        held += range(start, end + 1)
    assert held == sorted(set(held))
    summary = render(ReflectiveState(x1, "In short."))
    assert strip_markers(summary) == strip_markers(after)


def assert_close(one: GroundingTrace, other: GroundingTrace) -> None:
    torch.testing.assert_close(one.smoothed, other.smoothed, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.tensor(one.state.salience), torch.tensor(other.state.salience), rtol=1e-4, atol=1e-4
    )
    assert one.state.blocks == other.state.blocks


@pytest.mark.parametrize("name", BACKBONES)
def test_strategies_with_parts_missing(name: str) -> None:
    made = grounder(name)
    for strategy in (
        Strategy(STRATEGY.reasoning),
        Strategy((), entities=("bicycle",)),
        Strategy((" ",), speakers=("Ann",), entities=("",)),
    ):
        x1 = made.ground(state(strategy=strategy))
        assert x1.blocks
        assert all(math.isfinite(value) for value in x1.salience)
        check_markers(x1)
    for empty in (Strategy(()), Strategy(("",), scope=(" \n",))):
        trace = made.trace(state(strategy=empty))
        assert trace.state.blocks == ()
        assert not any(bool(v.any()) for v in trace.guidance.values())
        assert len(trace.state.salience) == len(LINES)
        check_markers(trace.state)


def test_a_dialogue_shorter_than_its_window() -> None:
    short = state((("Ann", "Hi."), ("Anna", "Hello!")))
    wide, narrow = (grounder("minilm", window_tokens=n).trace(short) for n in (256, 9))
    assert wide.codes.turn_tokens.tolist() == [4, 4]
    assert_close(wide, narrow)
    assert len(grounder("nano", context_codes="windowed").ground(short).salience) == 2


@pytest.mark.parametrize("name", BACKBONES)
def test_gold_evidence_and_answers_are_not_read(name: str) -> None:
    without = state()
    question = replace(without.question, evidence=("3",), answers=("the bicycle",), images=(0,))
    assert (
        grounder(name).ground(without).salience == grounder(name).ground(replace(without, question=question)).salience
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_hidden_states_that_are_not_finite_are_a_model_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = grounder(name), Backbone.hidden_states

    def broken(self: Backbone, *args, **named):
        return {layer: found * float("nan") for layer, found in original(self, *args, **named).items()}

    monkeypatch.setattr(Backbone, "hidden_states", broken)
    with pytest.raises(ModelError, match="not finite"):
        made.ground(state())


@pytest.mark.parametrize("name", BACKBONES)
def test_without_captions_their_share_is_of_no_account(name: str) -> None:
    found = [grounder(name, lam=lam).trace(state()) for lam in (0.0, 0.3, 1.0)]
    assert not bool((found[0].codes.part == Part.CAPTION).any())
    assert found[0].state.salience == found[1].state.salience == found[2].state.salience


@pytest.mark.parametrize("name", BACKBONES)
def test_speakers_that_share_the_beginning_of_a_name(name: str) -> None:
    trace = grounder(name).trace(state())
    spelt = {
        turn: "".join(t.text for t in trace.tokens() if t.turn == turn and t.part == Part.SPEAKER)
        for turn in range(len(LINES))
    }
    assert spelt == {turn: f"{speaker}:" for turn, (speaker, _) in enumerate(LINES)}
    for layer in trace.codes.layers:
        sizes = [len(codes.values) for codes in trace.codes.speakers(layer)]
        assert sizes == [len(backbone(name).tokenize(f"{speaker}:").ids) for speaker, _ in LINES]
    # a name said in the text is text
    said = grounder(name).trace(state((("Ann", "Anna: and Ann: were here"), ("Anna", "Ann:"))))
    marked = [(t.turn, t.text.strip()) for t in said.tokens() if t.part == Part.SPEAKER]
    assert "".join(text for turn, text in marked if turn == 0) == "Ann:"
    assert "".join(text for turn, text in marked if turn == 1) == "Anna:"


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("blank", ["", "   ", "\n\n"])
def test_a_turn_with_nothing_said(name: str, blank: str) -> None:
    lines = (LINES[0], ("Ann", blank), *LINES[2:])
    x1 = grounder(name, budget_share=1.0).ground(state(lines))
    assert x1.salience[1] == -math.inf
    assert all(math.isfinite(value) for n, value in enumerate(x1.salience) if n != 1)
    assert x1.blocks == ((0, 0), (2, 4))
    check_markers(x1)
    # in the window of another it is marked with it
    assert grounder(name, budget_share=1.0, window=1).ground(state(lines)).blocks == ((0, 4),)
    alone = grounder(name, budget_share=1.0).ground(state((("Ann", blank),)))
    assert (alone.salience, alone.blocks) == ((-math.inf,), ())


@pytest.mark.parametrize("name", BACKBONES)
def test_one_single_turn(name: str) -> None:
    one = state(LINES[:1])
    x1 = grounder(name, budget_share=1.0, window=3).ground(one)
    assert x1.blocks == ((0, 0),)
    assert math.isfinite(x1.salience[0])
    check_markers(x1)
    assert grounder(name, budget_share=0.5).ground(one).blocks == ()
    lone = grounder(name, budget_share=1.0).trace(state((("A", "b"),)))
    assert all(math.isfinite(value) for value in lone.smoothed.tolist())


@pytest.mark.parametrize("name", BACKBONES)
def test_many_turns_of_which_each_stands_alone(name: str) -> None:
    lines = tuple((("Ann", "Anna")[n % 2], f"{text} {n}") for n in range(5) for _, text in LINES)
    segments = tuple(Segment(n, n) for n in range(0, len(lines), 2))
    x1 = grounder(name, window=2, budget_share=1.0).ground(state(lines, segments=segments))
    assert x1.blocks == tuple((n, n) for n in range(len(segments)))
    check_markers(x1)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("mode", ["joint", "windowed"])
def test_results_depend_neither_on_batch_size_nor_on_the_caches(name: str, mode, tmp_path: Path) -> None:
    states = [state(), state(LINES[::-1], Strategy(("Who was sorry?",), entities=("park",)))]

    def made(folder: Path | None = None, **chosen) -> Grounder:
        found = grounder(name, context_codes=mode, window_tokens=12, **chosen)
        config = found.config
        found.windowed = WindowedCodes(found.encoder, config.window_tokens, config.cached_dialogues, folder)
        return found

    plain = [made().trace(one) for one in states]
    assert all(trace.state.blocks for trace in plain)
    for size in (1, 3):
        for expected, one in zip(plain, states, strict=True):
            assert_close(expected, made(batch_size=size).trace(one))
    for cached in (0, 1, 2):
        used = made(tmp_path, cached_dialogues=cached)
        for n in (0, 1, 1, 0):
            assert used.trace(states[n]).state == plain[n].state
    assert len(list(tmp_path.rglob("*.safetensors"))) == (2 if mode == "windowed" else 0)


@settings(max_examples=40)
@given(
    random_states(),
    st.sampled_from([("nano", "joint"), ("nano", "windowed"), ("minilm", "windowed")]),
    st.integers(0, 2),
    st.sampled_from([{"budget_share": 0.4}, {"budget_share": 1.0}, {"threshold": 0.0}]),
)
@example(state(segments=(Segment(0, 1), Segment(3, 4))), ("nano", "joint"), 1, {"budget_share": 1.0})
def test_markers_on_any_dialogue(one: FactualState, where: tuple[str, str], window: int, chosen: dict) -> None:
    trace = grounder(where[0], context_codes=where[1], window=window, **chosen).trace(one)
    check_markers(trace.state)
    assert len(trace.state.salience) == len(one.turns)
    if trace.budget is not None:
        assert sum(int(trace.codes.turn_tokens[a : b + 1].sum()) for a, b in trace.state.blocks) <= trace.budget
    assert not any(math.isnan(value) for value in trace.state.salience)
