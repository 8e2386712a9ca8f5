"""What notebooks show: text stays text, numbers are those of the model, and measuring accuracy changes no run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remind import read
from remind.alignment.metrics import read_metrics
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids, tokenize
from remind.models.generate import generate
from remind.models.images import open_image
from remind.states.pyramid import LEVELS, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.testbed.accuracy import accuracy_probe, correct_answers
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.pictures import draw, illustrate
from remind.testbed.world import WorldConfig, make_world
from remind.train_pra.config import TrainConfig, TrainerConfig
from remind.train_pra.run import make_trainer, train, trained_backbone
from remind.viewing import (
    Workbench,
    ask_about,
    best_features,
    feature_heat,
    image_tokens,
    new_folder,
    plot_next,
    search_table,
    show_dialogue,
    show_examples,
    show_generated,
    show_levels,
    turn_features,
)
from remind.viewing.plots import answer_probabilities, plot_answers, plot_carried, plot_salience, plot_settings
from sae import TopKSAE
from sae.probe import steer

HOSTILE = '<script>alert(1)</script> "it\'s" <b>bold</b> & &amp; שלום $x_1$'


class _Text(HTMLParser):
    """The text of HTML, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.grounds = "", set(), []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.grounds += [value for name, value in attrs if name == "style" and value and "background" in value]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


@pytest.fixture(scope="module")
def coders() -> dict[int, TopKSAE]:
    return {layer: TopKSAE(128, 96, 8, generator=torch.Generator().manual_seed(layer)).eval() for layer in (2, 3)}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    turns = [
        Turn("s1:1", "Ana", "dawn again today"),
        Turn("s1:2", "Ben", HOSTILE),
        Turn("s1:3", "Ana", "as promised", images=(Image(0, caption="this boat next to medals"),)),
        Turn("s1:4", "Ben", "yet another voucher for me"),
    ]
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
def bench(nano: Backbone, coders: dict[int, TopKSAE], corpus: Corpus) -> Workbench:
    return Workbench(nano, corpus, Path("none"), coders, {})


def test_a_dialogue_shows_every_token_and_shades_what_resonates(trace: GroundingTrace) -> None:
    page = show_dialogue(trace)
    seen = _Text(page.html)
    assert seen.tags <= {"div", "p", "span"}
    for turn in trace.state.factual.turns:
        assert turn.text in seen.text
        assert turn.id in seen.text
    assert "▾" in seen.text
    assert seen.grounds
    # a line for each turn, and one more for the caption
    assert page.text.count("\n") == len(trace.state.factual.turns) + 1
    assert show_dialogue(trace, most=2).html.count("border-left") in (2, 3)
    with pytest.raises(DataError, match="layer 7 has no SAE here; there are 2, 3"):
        show_dialogue(trace, layer=7)


def test_levels_mark_what_is_new(bench: Workbench, trace: GroundingTrace) -> None:
    marked = replace(trace.state, blocks=((0, 0),))
    record = record_of(ReflectiveState(marked, "Deep down Ana gets up early."), "test")
    page = _Text(show_levels(record).html)
    assert page.text.count("[ATTENTION]") >= 4
    assert page.text.count("Deep down Ana gets up early.") == 1
    assert HOSTILE in page.text
    assert "script" not in page.tags


def test_pictures_of_grounding_show_its_numbers(trace: GroundingTrace) -> None:
    bars = plot_salience(trace).figure.axes[0].patches
    assert np.allclose([bar.get_height() for bar in bars], trace.state.salience, atol=1e-6)
    carried = trace.top_features(3, 0, 5)
    axes = plot_carried(trace, 3, 0, 5, {carried[0][0]: "dawn"}).figure.axes[0]
    own, v = trace.codes.layers[3].dialogue[trace.codes.turn == 0], trace.guidance[3]
    total = float((own.values * v[own.indices]).sum())
    assert np.allclose([bar.get_width() for bar in axes.patches], [value / total for _, value in carried])
    everything = plot_carried(trace, 3, 0, 10_000).figure.axes[0].patches
    assert sum(bar.get_width() for bar in everything) == pytest.approx(1)
    assert axes.get_yticklabels()[0].get_text() == f"{carried[0][0]}  dawn"
    picture = plot_settings({"one": trace, "two": trace})
    assert picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="there is no turn 9"):
        plot_carried(trace, 3, 9)
    with pytest.raises(DataError, match="settings are compared"):
        plot_settings({})


def test_probabilities_are_those_of_the_tokens_one_by_one(nano: Backbone) -> None:
    world = make_world(WorldConfig(train=0, dev=0, test=1, formats=("single",)))
    record = records(world, LadderConfig())[0]
    found = answer_probabilities(nano, record)
    assert list(found) == ["x0", "x1", "x2"]
    # greedy decoding gives the likeliest of them, which takes nearly all
    for level, values in found.items():
        output = generate(nano, [record.level(level).text], 12)[0]
        likeliest = max(values, key=lambda name: values[name])
        assert output is not None
        assert output.text.startswith(f"<answer>{likeliest}</answer>")
        assert 0.9 < sum(values.values()) <= 1 + 1e-6
    ids, chance = prompt_ids(nano.tokenizer, record.x1.text), 1.0
    for token in tokenize(nano.tokenizer, "<answer>B").ids:
        with torch.no_grad():
            chance *= float(nano.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[token])
        ids.append(token)
    assert found["x1"]["B"] == pytest.approx(chance, rel=1e-3)
    axes = plot_answers({"before": found}, ["A"]).figure.axes[0]
    assert [label.get_fontweight() for label in axes.get_xticklabels()] == ["bold", *["normal"] * 3]
    with pytest.raises(ConfigError, match="give candidates"):
        answer_probabilities(nano, replace(record, format="direct", options=()))


def test_a_turn_is_found_in_its_session(bench: Workbench, corpus: Corpus) -> None:
    encoded, span = bench.in_session("s1:3")
    assert encoded.text[slice(*span)] == "Ana: as promised\n[Image #0 Caption] this boat next to medals"
    assert [label for label, _ in bench.texts()] == ["d/s1", "d/s2"]
    examples = bench.examples(per_feature=2)[3]
    page = _Text(turn_features(encoded, 3, span, examples, 4).html)
    assert page.text.startswith("Ana: as promised")
    shown = _Text(show_examples(examples, int(examples.features()[0])).html)
    assert "script" not in shown.tags | page.tags
    assert "voucher" in _Text(search_table(examples, "voucher").html).text
    assert "no feature" in search_table(examples, "zeppelin").text
    with pytest.raises(DataError, match="no turn 's9:9'"):
        bench.in_session("s9:9")


def test_pixels_and_words_are_told_apart(bench: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "boat.png"
    draw("this boat next to medals").save(path)
    encoded, grid = bench.with_image(path, "this boat next to medals")
    tokens = image_tokens(encoded)
    assert tokens.stop - tokens.start == int(grid[0].prod()) // 4
    words = best_features(encoded, 3, visual=False)
    assert "image token" not in words.html
    pixels = best_features(encoded, 3, visual=True, n=1)
    assert pixels.html.count("image token") == 1
    feature = int(pixels.text.split()[0])
    drawn = feature_heat(encoded, 3, [feature], open_image(path), grid).figure.axes[1].get_images()[1].get_array()
    codes = encoded.layer(3)[tokens]
    assert drawn.sum() == pytest.approx(float(codes.values[codes.indices == feature].sum()), rel=1e-5)
    with pytest.raises(DataError, match="no visual token"):
        best_features(bench.probe.encode("dawn again"), 3, visual=True)


def test_drawn_pictures_read_back(corpus: Corpus, tmp_path: Path) -> None:
    again = read(illustrate(corpus, tmp_path))
    assert [image.caption for image in again.dialogues[0].images] == ["this boat next to medals"]
    assert Path(str(again.dialogues[0].images[0].path)).is_file()
    assert draw("a boat").tobytes() == draw("some boat").tobytes() != draw("a dog").tobytes()


def test_steering_shows_the_edited_next_token(bench: Workbench, nano: Backbone, coders: Any) -> None:
    pushed = steer(nano.model, coders, {3: {5: 3.0}}, relative=True)
    axes = plot_next(nano, "Question: What?", {"as it is": nullcontext(), "pushed": pushed}, n=4).figure.axes[0]
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(2, 4)
    ids = [*prompt_ids(nano.tokenizer, "Question: What?"), *tokenize(nano.tokenizer, "<answer>").ids]
    with torch.no_grad():
        plain = nano.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
    assert heights[0].max() == pytest.approx(float(plain.max()), rel=1e-4)
    assert not np.allclose(heights[0], heights[1])


def test_replies_are_those_of_generation_under_each_edit(bench: Workbench, nano: Backbone, coders: Any) -> None:
    messages = ["Question: What?", HOSTILE]

    def pushed() -> Any:
        return steer(nano.model, coders, {3: {5: 3.0}}, relative=True)

    page = show_generated(nano, messages, {"as it is": nullcontext(), "pushed": pushed()}, 4)
    seen = _Text(page.html)
    assert "script" not in seen.tags
    plain = [output.text.strip() for output in generate(nano, messages, 4) if output]
    with pushed():
        edited = [output.text.strip() for output in generate(nano, messages, 4) if output]
    assert plain != edited
    for before, after in zip(plain, edited, strict=True):
        assert f"as it is{before}" in seen.text
        assert f"pushed{after}" in seen.text
    with pytest.raises(ConfigError, match="at least one message"):
        show_generated(nano, [], {"as it is": nullcontext()})
    with pytest.raises(ModelError, match=r"nano wrote nothing: .* exceed"):
        show_generated(nano, ["tea " * 40_000], {"as it is": nullcontext()})


def test_own_questions_are_read_back(corpus: Corpus, tmp_path: Path) -> None:
    plain = Corpus(corpus.dialogues)
    path = ask_about(
        plain,
        {"What habit does Ben have?": ("saver", "pattern_induction"), "And Ana?": (None, None)},
        tmp_path / "asked.jsonl",
    )
    first, second = read(path).questions
    assert (first.text, first.answers, first.split) == ("What habit does Ben have?", ("saver",), "train")
    assert first.dimension == "pattern_induction"
    assert (second.answers, second.dialogue_id) == ((), "d")
    assert [new_folder(tmp_path / "run").name for _ in range(2)] == ["run-1", "run-2"]
    with pytest.raises(ConfigError, match="at least one question"):
        ask_about(plain, {}, tmp_path / "none.jsonl")


@pytest.mark.slow
def test_measuring_accuracy_leaves_training_as_it_is(tmp_path: Path) -> None:
    world = make_world(WorldConfig(train=1, dev=0, test=1))
    questions = [record for record in records(world, LadderConfig()) if record.split == "test"][:4]
    states = write_states(world, tmp_path / "states", LadderConfig())
    trainer = TrainerConfig(learning_rate=1e-3, max_steps=3, batch_size=2, eval_strategy="no")
    first, second = (TrainConfig(out=str(tmp_path / name), states=str(states), trainer=trainer) for name in "ab")
    nano = load_backbone("nano")
    run = train(first, accuracy_probe(nano, questions, 2))
    plain = make_trainer(second)
    plain.train()
    rows = {name: read_metrics(tmp_path / name) for name in "ab"}
    losses = {name: [row["total"] for row in some if row["kind"] == "train"] for name, some in rows.items()}
    assert losses["a"] == losses["b"]
    assert {row["kind"] for row in rows["b"]} == {"train"}
    accuracy = [row for row in rows["a"] if row["kind"] == "accuracy"]
    assert [row["step"] for row in accuracy] == [0, 2, 3]
    trained = trained_backbone(run)
    for row, backbone in ((accuracy[0], nano), (accuracy[2], trained)):
        assert all(row[level] == sum(correct_answers(backbone, questions, level)) / 4 for level in LEVELS)
    own, written = plain.model.state_dict(), trained.model.state_dict()
    assert all(torch.equal(own[name], written[name]) for name in own)
    with pytest.raises(ConfigError, match="questions"):
        accuracy_probe(nano, [], 1)
