"""Images in training, grounding, evaluation and windows of dialogue text: the same tokens and pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture

from remind.alignment.examples import example_of
from remind.core.errors import ConfigError, ImagePathError
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.evaluation.contexts import Asked, Prompter
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.codes import Part
from remind.models.backbone import Backbone, load_backbone
from remind.models.generate import generate
from remind.models.images import Pictures, content_of, open_image
from remind.models.windows import batches, make_windows
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from sae.harvest import harvest
from tests.grounding.conftest import saes_for

MOST = 12
#: Sizes of the images: small, large, wide and flat.
SIZES = ((40, 30), (700, 500), (640, 90))
COUNTS = [3 * 2, 4 * 2, 9 * 1]


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained", dtype="float64")


def drawn(path: Path, size: tuple[int, int], number: int, mode: str = "RGB") -> str:
    Picture.effect_noise(size, 40 + number).convert(mode).save(path)
    return str(path)


@pytest.fixture
def state(tmp_path: Path) -> FactualState:
    paths = [drawn(tmp_path / f"{number}.png", size, number) for number, size in enumerate(SIZES)]
    turns = (
        Turn("t0", "Ana", "Look <|image_pad|> here!", images=(Image(0, paths[0], "a red\nbike"), Image(1, paths[1]))),
        Turn("t1", "Ben", "Nice. 😀 Is it new?", images=(Image(2, None, "a hill, far away"),)),
        Turn("t2", "Ana", "", images=(Image(3, paths[2], "a fence"),)),
        Turn("t3", "Ben", "I see."),
    )
    dialogue = Dialogue("d", (Session("s", None, turns),))
    question = Question("q", "d", "What is new?", answers=("the bike",), evidence=("t0",))
    return FactualState(dialogue, question, (Segment(0, 3),), Strategy(("Look at it.",), entities=("bike",)))


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[dict[str, Any]]:
    """The keyword arguments of every call."""
    calls: list[dict[str, Any]] = []
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append({"args": args, **kwargs})
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_all_show_a_record_alike(nano: Backbone, state: FactualState, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(ReflectiveState(AttentionalState(state, ((0, 0),)), "A bike."), "test")
    shown = Pictures(nano, MOST)
    example = example_of(nano.tokenizer, record, shown)
    ids, pixels = example.prompts[0], example.pixels()
    # of 32 x 32 pixels each: at least 4 and at most 12, by hand
    assert [int(row.prod()) // 4 for row in pixels["image_grid_thw"]] == COUNTS

    asked = watched(monkeypatch, nano.model, "generate")
    [prompt] = Prompter(pixels=True).prompts("x0", Asked([record]))
    generate(nano, [content_of(prompt.text, prompt.pictures)], 2, pictures=Pictures(nano, MOST))
    [call] = asked
    assert call["input_ids"][0].tolist() == ids.tolist()
    assert all(torch.equal(call[name], pixels[name]) for name in ("pixel_values", "image_grid_thw"))

    read = watched(monkeypatch, nano, "hidden_states")
    grounder = Grounder(nano, saes_for(nano, (2,)), None, GroundingConfig(images="pixels", image_tokens=MOST))
    trace = grounder.trace(state)
    [call] = read
    assert all(torch.equal(call[name], pixels[name]) for name in ("pixel_values", "image_grid_thw"))
    seen, header = call["args"][0][0].tolist(), len(nano.tokenizer("<|im_start|>user\n")["input_ids"])
    # what stands behind the strategy is not read
    assert ids.tolist()[header : header + len(seen)] == seen

    # the tokens of an image are its caption's, in its turn
    image = torch.tensor(seen) == nano.model.config.image_token_id
    assert int(image.sum()) == sum(COUNTS)
    captions = trace.codes.turn[trace.codes.part == Part.CAPTION].tolist()
    hill = len(nano.tokenize("a hill, far away").ids)
    assert captions == [0] * sum(COUNTS[:2]) + [1] * hill + [2] * COUNTS[2]

    # norms of images and of words have scales of their own: neither kind is a sink beside the other
    def scaled(ids: Any, *args: Any, **kwargs: Any) -> Any:
        shown = (ids == nano.model.config.image_token_id)[..., None]
        return {
            layer: torch.where(shown, 300 * states, states) for layer, states in original(ids, *args, **kwargs).items()
        }

    original = nano.hidden_states
    monkeypatch.setattr(nano, "hidden_states", scaled)
    coded = (grounder.trace(state).codes.layers[2].dialogue.values != 0).any(1)
    assert torch.equal(coded, (trace.codes.layers[2].dialogue.values != 0).any(1))
    assert coded.float().mean() > 0.9


@pytest.mark.parametrize("most", [8, 500])
def test_pixels_are_those_of_the_processor_on_its_own(nano: Backbone, tmp_path: Path, most: int) -> None:
    """All at once, resized by the library."""
    kinds = {"RGB": (200, 120), "L": (64, 300), "P": (90, 90), "1": (333, 150)}
    paths = [drawn(tmp_path / f"{n}.png", size, n, mode) for n, (mode, size) in enumerate(kinds.items())]
    processor = nano.processor.image_processor
    size = {"shortest_edge": processor.size["shortest_edge"], "longest_edge": min(most * 32 * 32, 256 * 256)}
    expected = processor(images=[open_image(path) for path in paths], return_tensors="pt", size=size)
    found = Pictures(nano, most).tensors(paths)
    assert all(torch.equal(found[name], expected[name]) for name in ("pixel_values", "image_grid_thw"))


def test_bad_images_are_named(nano: Backbone, tmp_path: Path) -> None:
    Picture.new("RGB", (1, 500)).save(tmp_path / "thin.png")
    (tmp_path / "text.png").write_text("hello")
    for name, pattern in (
        (f"{tmp_path}/gone.png", "gone.png: no such image"),
        (f"{tmp_path}/text.png", "cannot be read as an image"),
        (f"{tmp_path}/thin.png", "1 x 500 pixels cannot be shown"),
        ("http://h/a.png", "nothing is fetched"),
    ):
        with pytest.raises(ImagePathError, match=pattern):
            Pictures(nano, MOST).tensors([name])


@pytest.fixture
def pictured(tmp_path: Path) -> Dialogue:
    def image(index: int, size: tuple[int, int], caption: str | None) -> Image:
        return Image(index, drawn(tmp_path / f"{index}.png", size, index), caption)

    turns = (
        Turn("1:0", "Ana", "look at this", images=(image(0, (90, 60), "a red\nboat"), image(1, (200, 200), None))),
        Turn("1:1", "Ben", "lovely, and here is mine", images=(Image(2, None, "only a caption"),)),
        Turn("1:2", "Ana", "word " * 40, images=(image(3, (64, 128), "a tall tree"),)),
    )
    return Dialogue("d", (Session("s", None, turns),))


def test_images_stand_in_place_of_their_captions_and_stay_whole(nano: Backbone, pictured: Dialogue) -> None:
    for size in (30, 1000):
        windows = make_windows(nano, [pictured], size, "test", image_tokens=16)
        config = nano.model.config
        ids = [token for window in windows for token in window.ids]
        assert all(len(window.ids) <= size for window in windows)
        assert [path for w in windows for path in w.images] == [i.path for i in pictured.images if i.path]
        pads = {config.image_token_id, config.vision_start_token_id, config.vision_end_token_id}
        plain = nano.tokenizer.decode([token for token in ids if token not in pads])
        # as in grounding: no caption beside an image
        assert "look at this\n[Image #0 Caption] \n[Image #1 Caption] \nBen:" in plain
        assert "[Image #2 Caption] only a caption\n" in plain
        # turns of the tokens go up, and an image belongs to its turn
        turns = [turn for window in windows for turn in window.turns]
        assert turns == sorted(turns)
        assert {turn for token, turn in zip(ids, turns, strict=True) if token == config.image_token_id} == {0, 2}


def test_a_batch_with_images_runs_as_the_model_takes_it(nano: Backbone, pictured: Dialogue) -> None:
    windows = make_windows(nano, [pictured], 40, "test", image_tokens=16)
    [(inputs, _)] = list(batches(nano, windows, 16, image_tokens=16))
    assert inputs["position_ids"].shape == (3, *inputs["input_ids"].shape)
    # the median that tells sinks apart is that of the batch
    options = {"special_ids": nano.tokenizer.all_special_ids, "sink_factor": None}
    [batch] = harvest(nano.model, [inputs], [1, 3], **options)
    visual = inputs["input_ids"] == nano.model.config.image_token_id
    assert int(batch.visual.sum()) == int(visual.sum()) > 0
    # each window alone gives what it gives in the batch
    for row, window in enumerate(windows):
        [(alone, _)] = list(batches(nano, [window], 1, image_tokens=16))
        [single] = harvest(nano.model, [alone], [1, 3], **options)
        mine = batch.rows == row
        torch.testing.assert_close(single.activations[3], batch.activations[3][mine], rtol=1e-4, atol=1e-4)


def test_images_that_cannot_be_shown(nano: Backbone, pictured: Dialogue, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window 8 is too small for the"):
        make_windows(nano, [pictured], 8, "test", image_tokens=16)
