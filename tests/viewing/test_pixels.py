"""States grounded with images as pixels, and their pages."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image as Picture
from transformers import GenerationMixin

from remind.build import build
from remind.build.config import BuildStatesConfig
from remind.core.errors import ConfigError, ImagePathError
from remind.core.run_folder import as_dict
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers.refmem import write_refmem
from remind.grounding import GroundingConfig
from remind.models.backbone import load_backbone
from remind.models.nano import save_nano
from remind.states.dataset import read_manifest
from remind.states.pyramid import FactualState, Segment, Strategy
from remind.train_pra.config import DataConfig, TrainConfig
from remind.viewing.inspector import InspectConfig, inspect_grounding
from remind.viewing.workbench import Workbench
from sae import TopKSAE, layer_folder

CAPTION = 'a "red" <b>bike</b> & a fence'


@pytest.fixture
def cfg(tmp_path: Path) -> BuildStatesConfig:
    """One dialogue with a wide image, asked about by two questions."""
    noise = Picture.effect_noise((600, 300), 60).convert("RGB")
    noise.save(tmp_path / "bike.png")
    turns = (
        Turn("t0", "Ana", "This is my new bike.", images=(Image(0, str(tmp_path / "bike.png"), CAPTION),)),
        Turn("t1", "Ben", "It is a fine one.", images=(Image(1, None, "a thumb"),)),
        Turn("t2", "Ana", "I bought it on Friday."),
    )
    questions = tuple(
        Question(f"q{number}", "d", text, answers=("so",), evidence=("t0",), split="test")
        for number, text in enumerate(("What did Ana buy?", "When was it?"))
    )
    write_refmem(Corpus((Dialogue("d", (Session("s", None, turns),)),), questions), tmp_path / "talk.jsonl")
    TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 2))
    return BuildStatesConfig(
        input=str(tmp_path / "talk.jsonl"),
        out=str(tmp_path / "states"),
        backbone=str(save_nano(tmp_path / "nano")),
        sae=str(tmp_path / "sae"),
        cache=str(tmp_path / "cache"),
        grounding=GroundingConfig(images="pixels", image_tokens=16, image_root=str(tmp_path)),
    )


def test_states_and_pages_show_the_pixels(cfg: BuildStatesConfig, tmp_path: Path) -> None:
    states = build(cfg)
    settings = read_manifest(states)["config"]["grounding"]
    assert (settings["images"], settings["image_tokens"]) == ("pixels", 16)
    model = save_nano(tmp_path / "model")
    config = {"data": {"images": "pixels", "image_tokens": 16}}
    (model / "training.json").write_text(json.dumps({"config": config}))
    page = tmp_path / "page.html"
    inspect_grounding(
        InspectConfig(states=str(states), question="q0", out=str(page), model=str(model), max_new_tokens=3)
    )
    html = page.read_text(encoding="utf-8")
    # the page reads the image as the build did, so that their saliences agree
    assert 'class="notice"' not in html
    [(source, alternative)] = re.findall(r'<img class="picture" src="([^"]*)" alt="([^"]*)">', html)
    assert unescape(alternative) == f"[Image #0 Caption] {CAPTION}"
    kind, _, content = source.partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Picture.open(io.BytesIO(base64.b64decode(content)), formats=["JPEG"]).size == (240, 120)
    assert "img-src data:" in html
    # the same files give the same states; others are another build
    before = states.joinpath("manifest.json").read_bytes()
    assert build(cfg) == states
    Picture.new("RGB", (600, 300), (200, 20, 30)).save(tmp_path / "bike.png")
    with pytest.raises(ConfigError, match="exists, built from other input or settings"):
        build(cfg)
    assert states.joinpath("manifest.json").read_bytes() == before


def test_an_image_outside_of_the_root_stops_the_build(cfg: BuildStatesConfig, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    grounding = replace(cfg.grounding, image_root=str(tmp_path / "other"))
    with pytest.raises(ImagePathError, match=r"^[^\n]*bike\.png \[d\]: is outside grounding\.image_root [^\n]*$"):
        build(replace(cfg, grounding=grounding))
    assert not Path(cfg.out).exists()


@pytest.mark.parametrize("folder", ["run", "export", "captions"])
def test_a_notebook_asks_a_model_with_the_images_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    Picture.effect_noise((96, 64), 60).convert("RGB").save(tmp_path / "bike.png")
    turn = Turn("t0", "Ana", "This is new.", images=(Image(0, str(tmp_path / "bike.png"), CAPTION),))
    question = Question("q", "d", "What is new?")
    dialogue = Dialogue("d", (Session("s", None, (turn,)),))
    state = FactualState(dialogue, question, (Segment(0, 0),), Strategy(("Look.",)))
    shown = DataConfig(images="captions" if folder == "captions" else "pixels", image_tokens=64)
    trained = as_dict(TrainConfig("states", "out", data=shown))
    if folder == "export":
        (tmp_path / "training.json").write_text(json.dumps({"config": trained}))
    else:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(trained))
        (tmp_path / "data.json").write_text("{}")
    given = []
    generate = GenerationMixin.generate

    def spy(self: Any, **inputs: Any) -> Any:
        given.append(inputs)
        return generate(self, **inputs)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    model = replace(load_backbone("nano-untrained"), name=str(tmp_path))
    bench = Workbench(model, Corpus((dialogue,), (question,)), Path("none"), {}, {})
    bench.answer(state, model, max_new_tokens=2)
    (inputs,) = given
    text = model.tokenizer.decode(inputs["input_ids"][0])
    assert (CAPTION in text) == (folder == "captions")
    assert text.count("<|image_pad|>") == (0 if folder == "captions" else 6)  # 32 x 32 pixels to a token
    assert ("pixel_values" in inputs) == (folder != "captions")
    if folder != "captions":
        expected = model.processor.image_processor(images=[Picture.open(tmp_path / "bike.png")], return_tensors="pt")
        torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"])
