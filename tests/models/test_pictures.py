"""Images of a state in training, grounding and evaluation: the same tokens and pixels, those of qwen-vl-utils."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture

from remind.alignment.examples import example_of
from remind.core.errors import ConfigError, ImagePathError
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.evaluation.conditions import Prompter
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.places import Part
from remind.models.backbone import Backbone
from remind.models.generate import generate
from remind.models.images import _qwen_vl_utils, read_image
from remind.models.load import load_backbone
from remind.models.pictures import Pictures, Place, content_of, places_of
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from tests.grounding.conftest import saes_for
from tests.models.test_chat import upstream_reader

MOST = 12
#: Sizes of the images: small, large, wide and flat.
SIZES = ((40, 30), (700, 500), (640, 90))
COUNTS = [3 * 2, 4 * 2, 9 * 1]


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained", dtype="float64")


@pytest.fixture
def state(tmp_path: Path) -> FactualState:
    paths = [str(tmp_path / f"{number}.png") for number in range(len(SIZES))]
    for number, size in enumerate(SIZES):
        Picture.effect_noise(size, 40 + number).convert("RGB").save(paths[number])
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
    [prompt] = Prompter(pixels=True).prompts("x0", [record])
    generate(nano, [prompt.content], 2, pictures=Pictures(nano, MOST))
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
    assert nano.tokenizer.decode(seen).endswith("Look at it.\n") or nano.tokenizer.decode(seen).endswith("Look at it.")

    # the tokens of an image are its caption's, in its turn
    image = torch.tensor(seen) == nano.model.config.image_token_id
    assert int(image.sum()) == sum(COUNTS)
    captions = trace.codes.turn[trace.codes.part == Part.CAPTION].tolist()
    hill = len(nano.tokenize("a hill, far away").ids)
    assert captions == [0] * sum(COUNTS[:2]) + [1] * hill + [2] * COUNTS[2]
    text = record.x0.text
    covered = {text[start:end] for (start, end), part in zip(trace.codes.spans, trace.codes.part.tolist(), strict=True)
               if part == Part.CAPTION}  # fmt: skip
    assert {"a red bike", "(no caption)", "a fence"} <= covered


def test_as_qwen_vl_utils_and_the_processor_show_it(
    nano: Backbone, state: FactualState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain chat, the template as text, the package's own `process_vision_info`, the image processor on its own."""
    turns = (replace(state.dialogue.turns[0], text="Look here!"), *state.dialogue.turns[1:])
    state = replace(state, dialogue=Dialogue("d", (Session("s", None, turns),)))
    record = record_of(ReflectiveState(AttentionalState(state, ()), ""), "test")
    processor = nano.processor.image_processor
    text, rest, content = record.x0.text, record.x0.text, []
    for caption, image in (("a red bike", 0), ("(no caption)", 1), ("a fence", 3)):
        before, rest = rest.split(caption, 1)
        path = state.dialogue.images[image].path
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": MOST * 32 * 32}
        content += [{"type": "text", "text": before}, {"type": "image", "image": path, **limits}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": rest}]}]
    images, _ = upstream_reader(monkeypatch)(messages, image_patch_size=16)
    pixels = processor(images=images, do_resize=False, return_tensors="pt")
    prompt = nano.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = prompt.split("<|image_pad|>")
    for number, row in enumerate(pixels["image_grid_thw"]):
        pieces[number] += "<|image_pad|>" * (int(row.prod()) // 4)
    shown = Pictures(nano, MOST)
    assert shown.prompt(nano.tokenizer, record, "x0") == nano.tokenizer("".join(pieces))["input_ids"]
    ours = shown.tensors([image.path for image in state.dialogue.images if image.path], "q")
    assert all(torch.equal(ours[name], pixels[name]) for name in ours)
    assert text.count("Caption]") == 4


def test_tokens_of_a_text_stand_where_they_stood(nano: Backbone, state: FactualState) -> None:
    """Each stretch of text between images, tokenised alone."""
    rendered = record_of(ReflectiveState(AttentionalState(state, ()), ""), "test").x0
    pictures = [("t0", 0), ("t0", 1), ("t2", 0)]
    places = tuple(
        Place(*rendered.turns[int(turn[1])].captions[place], state.dialogue.images[number].path or "")
        for number, (turn, place) in zip((0, 1, 3), pictures, strict=True)
    )
    found = Pictures(nano, MOST).tokens(nano.tokenizer, rendered.text, places)
    expected, cursor = [], 0
    for (start, end, _), count in zip((*places, Place(len(rendered.text), 0, "")), (*COUNTS, -2), strict=True):
        piece = nano.tokenize(rendered.text[cursor:start])
        expected += [(cursor + a, cursor + b) for a, b in piece.offsets]
        expected += [(start, end)] * (count + 2)
        cursor = end
    assert found.offsets == expected
    # without images, a text is what it always was
    assert Pictures(nano, MOST).tokens(nano.tokenizer, rendered.text, ()) == nano.tokenize(rendered.text)
    assert content_of(rendered.text, ()) == rendered.text
    assert places_of(rendered, [], "q", "x0") == ()


def test_grounding_sees_the_pixels(nano: Backbone, state: FactualState, tmp_path: Path) -> None:
    grounder = Grounder(nano, saes_for(nano, (2,)), None, GroundingConfig(images="pixels", image_tokens=MOST))
    plain = Grounder(nano, saes_for(nano, (2,)), None, GroundingConfig())
    before, captions = grounder.trace(state), plain.trace(state)
    assert before.state.salience != captions.state.salience
    Picture.new("RGB", SIZES[2], (200, 20, 30)).save(tmp_path / "2.png")
    after = grounder.trace(state)
    codes = [trace.codes.layers[2].dialogue.values for trace in (before, after)]
    # a turn sees what came before it
    earlier = before.codes.turn < 2
    assert torch.equal(codes[0][earlier], codes[1][earlier])
    assert not torch.equal(codes[0][~earlier], codes[1][~earlier])
    assert plain.ground(state).salience == captions.state.salience
    # a state without image files is as it was
    bare = tuple(replace(turn, images=()) for turn in state.dialogue.turns)
    bare_state = replace(state, dialogue=Dialogue("d", (Session("s", None, bare),)))
    assert grounder.ground(bare_state).salience == plain.ground(bare_state).salience


def test_what_cannot_be_shown_is_named(nano: Backbone, state: FactualState, tmp_path: Path) -> None:
    saes, pixels = saes_for(nano, (2,)), GroundingConfig(images="pixels")
    with pytest.raises(ConfigError, match=r"grounding\.images pixels needs grounding\.context_codes joint"):
        GroundingConfig(images="pixels", context_codes="windowed")
    minilm = load_backbone("minilm")
    with pytest.raises(ConfigError, match=r"grounding\.images pixels needs grounding\.context_codes joint"):
        Grounder(minilm, saes_for(minilm, (2,)), None, pixels)
    with pytest.raises(ImagePathError, match=r"^[^\n]*0\.png \[q\]: is outside grounding\.image_root [^\n]*$"):
        Grounder(nano, saes, None, replace(pixels, image_root=str(tmp_path / "other"))).ground(state)
    (tmp_path / "1.png").unlink()
    with pytest.raises(ImagePathError, match=r"^[^\n]*1\.png \[q\]: no such image$"):
        Grounder(nano, saes, None, pixels).ground(state)


def test_an_image_that_few_tokens_cannot_show_is_refused(nano: Backbone, tmp_path: Path) -> None:
    """qwen-vl-utils would give it no height at all."""
    path = str(tmp_path / "thin.png")
    Picture.new("RGB", (3000, 20)).save(path)
    part = {"type": "image", "image": path, "max_pixels": 4 * 32 * 32}
    for show in (
        lambda: Pictures(nano, 4).ids(nano.tokenizer, content_of("a b", [Place(1, 2, path)])),
        lambda: Pictures(nano, 4).tensors([path], "q"),
        lambda: read_image(part, 16),
    ):
        with pytest.raises(ImagePathError, match=r"thin\.png[^\n]*3000 x 20 pixels cannot be shown"):
            show()


@pytest.mark.parametrize("broken", [False, True])
def test_qwen_vl_utils_opens_without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Missing, or installed and not loadable; nothing is left behind that others would take for either package."""
    if broken:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms')")
        monkeypatch.syspath_prepend(tmp_path)
    elif find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    for name in ("qwen_vl_utils", "qwen_vl_utils.vision_process"):  # another test may have opened it
        monkeypatch.delitem(sys.modules, name, raising=False)
    _qwen_vl_utils.cache_clear()
    package = _qwen_vl_utils()
    assert package.smart_resize(300, 500, 32) == (288, 512)
    assert not {"qwen_vl_utils", "torchvision", "torchvision.transforms"} & set(sys.modules)
    with pytest.raises(RuntimeError if broken else ModuleNotFoundError, match="torchvision"):
        import_module("torchvision")
