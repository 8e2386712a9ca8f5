"""What notebooks show: text stays text, and numbers are those of the model."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remind import read, viewing
from remind.core.errors import ConfigError
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids, tokenize
from remind.models.generate import generate
from remind.models.images import open_image
from remind.states.pyramid import LEVELS, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.pictures import draw
from remind.testbed.world import WorldConfig, make_world
from sae import TopKSAE
from sae.probe import steer
from tests.viewing.conftest import saes

HOSTILE = '<script>alert(1)</script> "it\'s" <b>bold</b> & &amp; שלום $x_1$'


def text_of(page: viewing.Page) -> str:
    """The text of a page that nothing runs in."""
    assert not re.search(r"<script|<[^>]* on\w+=", page.html)
    return page.text


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


@pytest.fixture(scope="module")
def coders() -> dict[int, TopKSAE]:
    return saes(2, 3)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    picture = Image(0, caption="this boat next to medals")
    said = [("Ana", "dawn again today"), ("Ben", HOSTILE), ("Ana", "as promised"), ("Ben", "yet another voucher")]
    turns = [Turn(f"s1:{n + 1}", *line, images=(picture,) * (n == 2)) for n, line in enumerate(said)]
    more = [Turn("s2:1", "Ana", "the bus was late"), Turn("s2:2", "Ben", "it was my sunrise as ever")]
    dialogue = Dialogue("d", (Session("s1", None, tuple(turns)), Session("s2", None, tuple(more))))
    question = Question("q", "d", "What habit does Ana have?", "single", ("lark", "owl"), ("A",), ("s1:1",))
    return Corpus((dialogue,), (question,))


@pytest.fixture(scope="module")
def trace(nano: Backbone, coders: dict[int, TopKSAE], corpus: Corpus) -> GroundingTrace:
    strategy = Strategy(("Look for what is done again.",), ("Ana",), focus=("habit",))
    state = FactualState(corpus.dialogues[0], corpus.questions[0], (Segment(0, 3), Segment(5, 5)), strategy)
    return Grounder(nano, coders, None, GroundingConfig(window=0)).trace(state)


@pytest.fixture(scope="module")
def bench(nano: Backbone, coders: dict[int, TopKSAE], corpus: Corpus) -> viewing.Workbench:
    return viewing.Workbench(nano, corpus, Path("none"), coders, {})


def test_a_workbench_opens_at_once_or_says_what_is_missing(tmp_path: Path) -> None:
    bench = viewing.open_workbench("nano", out=tmp_path)
    assert bench.record(bench.trace(bench.state(bench.corpus.questions[0]))).levels == LEVELS
    with pytest.raises(ConfigError, match="no SAEs of minilm are at hand; train some"):
        viewing.open_workbench("minilm")


def test_a_dialogue_and_its_levels_are_shown_as_text(bench: viewing.Workbench, trace: GroundingTrace) -> None:
    seen = text_of(viewing.show_dialogue(trace))
    assert all(turn.text in seen and turn.id in seen for turn in trace.state.factual.turns)
    assert "▾" in seen
    assert viewing.plot_settings({"one": trace, "two": trace})._repr_png_().startswith(b"\x89PNG")
    heights = [bar.get_height() for bar in viewing.plot_salience(trace).figure.axes[0].patches]
    assert np.allclose(heights, trace.state.salience, atol=1e-6)
    carried = trace.top_features(3, 0, 5)
    axes = viewing.plot_carried(trace, 3, 0, 5, {carried[0][0]: "dawn"}).figure.axes[0]
    assert axes.get_yticklabels()[0].get_text() == f"{carried[0][0]}  dawn"
    record = record_of(ReflectiveState(trace.state, "Deep down Ana gets up early."), "test")
    levels = text_of(viewing.show_levels(record))
    assert levels.count("Deep down Ana gets up early.") == 1
    assert HOSTILE in levels


def test_probabilities_are_those_of_the_tokens_one_by_one(nano: Backbone) -> None:
    record = records(make_world(WorldConfig(train=0, dev=0, test=1, formats=("single",))), LadderConfig())[0]
    found = viewing.answer_probabilities(nano, record)
    ids, chance = prompt_ids(nano.tokenizer, record.x1.text), 1.0
    for token in tokenize(nano.tokenizer, "<answer>B").ids:
        with torch.no_grad():
            chance *= float(nano.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[token])
        ids.append(token)
    assert found["x1"]["B"] == pytest.approx(chance, rel=1e-3)
    assert viewing.plot_answers({"before": found}, ["A"])._repr_png_()
    with pytest.raises(ConfigError, match="not a single-choice question"):
        viewing.answer_probabilities(nano, replace(record, format="direct", options=()))


def test_a_turn_is_found_in_its_session(bench: viewing.Workbench, tmp_path: Path) -> None:
    encoded, span = bench.in_session("s1:3")
    assert encoded.text[slice(*span)] == "Ana: as promised\n[Image #0 Caption] this boat next to medals"
    examples = bench.examples(per_feature=2)[3]
    assert text_of(viewing.turn_features(encoded, 3, span, examples, 4)).startswith("Ana: as promised")
    assert "voucher" in text_of(viewing.search_table(examples, "voucher"))
    # of a longer session what stands around it
    for turn_id, most in (("s1:1", 40), ("s1:3", 40), ("s1:3", 60)):
        whole, place = bench.in_session(turn_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.probe, "max_length", most)
            part, there = bench.in_session(turn_id)
        assert part.text[slice(*there)] == whole.text[slice(*place)]
        assert part.text in whole.text
        assert len(part.ids) <= most < len(whole.ids)
    # pixels and words are told apart
    draw("this boat next to medals").save(tmp_path / "boat.png")
    encoded, grid = bench.with_image(tmp_path / "boat.png", "this boat next to medals")
    feature = int(viewing.best_features(encoded, 3, visual=True, n=1).text.splitlines()[1].split()[0])
    axes = viewing.feature_heat(encoded, 3, [feature], open_image(tmp_path / "boat.png"), grid).figure.axes[1]
    codes = encoded.layer(3)[viewing.image_tokens(encoded)]
    wanted = float(codes.values[codes.indices == feature].sum())
    assert axes.get_images()[1].get_array().sum() == pytest.approx(wanted, rel=1e-5)


def test_steering_shows_the_edited_tokens(bench: viewing.Workbench, nano: Backbone, coders: Any) -> None:
    def pushed() -> Any:
        return steer(nano.model, coders, {3: {5: 3.0}}, relative=True)

    runs = {"as it is": nullcontext(), "pushed": pushed()}
    (axes,) = viewing.plot_next(nano, "Question: What?", runs, n=4).figure.axes
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(2, 4)
    ids = [*prompt_ids(nano.tokenizer, "Question: What?"), *tokenize(nano.tokenizer, "<answer>").ids]
    with torch.no_grad():
        plain = nano.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
    assert heights[0].max() == pytest.approx(float(plain.max()), rel=1e-4)
    assert not np.allclose(heights[0], heights[1])
    seen = text_of(viewing.show_generated(nano, [HOSTILE], {"as it is": nullcontext(), "pushed": pushed()}, 4))
    assert f"as it is {generate(nano, [HOSTILE], 4)[0].text.strip()}" in seen


def test_own_questions_are_read_back(corpus: Corpus, tmp_path: Path) -> None:
    asked = {"What habit does Ben have?": ("saver", "pattern_induction"), "And Ana?": (None, None)}
    first, second = read(viewing.ask_about(Corpus(corpus.dialogues), asked, tmp_path / "asked.jsonl")).questions
    assert (first.answers, first.split, first.dimension) == (("saver",), "train", "pattern_induction")
    assert (second.answers, second.dialogue_id) == ((), "d")
