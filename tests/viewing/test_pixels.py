"""States grounded with images as pixels, and their pages."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import torch
from PIL import Image as Picture

from remind.build import build
from remind.build.config import BuildStatesConfig
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers.refmem import write_refmem
from remind.grounding import GroundingConfig
from remind.models.nano import save_nano
from remind.viewing.inspector import InspectConfig, inspect_grounding
from sae import TopKSAE, layer_folder

CAPTION = 'a "red" <b>bike</b> & a fence'


def test_states_and_pages_show_the_pixels(tmp_path: Path) -> None:
    Picture.effect_noise((600, 300), 60).convert("RGB").save(tmp_path / "bike.png")
    turns = (
        Turn("t0", "Ana", "This is my new bike.", images=(Image(0, str(tmp_path / "bike.png"), CAPTION),)),
        Turn("t1", "Ben", "It is a fine one.", images=(Image(1, None, "a thumb"),)),
    )
    question = Question("q0", "d", "What did Ana buy?", answers=("so",), evidence=("t0",), split="test")
    write_refmem(Corpus((Dialogue("d", (Session("s", None, turns),)),), (question,)), tmp_path / "talk.jsonl")
    TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 2))
    files = {name: str(tmp_path / name) for name in ("sae", "cache")}
    grounding = GroundingConfig(images="pixels", image_tokens=16, image_root=str(tmp_path))
    config = BuildStatesConfig(input=str(tmp_path / "talk.jsonl"), out=str(tmp_path / "states"), **files)
    model, page = save_nano(tmp_path / "model"), tmp_path / "page.html"
    states = build(replace(config, backbone=str(model), grounding=grounding))
    # a model that was trained on pixels is shown them
    (model / "training.json").write_text(json.dumps({"config": {"data": {"images": "pixels", "image_tokens": 16}}}))
    inspect_grounding(
        InspectConfig(states=str(states), question="q0", out=str(page), model=str(model), max_new_tokens=3)
    )
    html = page.read_text(encoding="utf-8")
    # the page reads the image as the build did, so that their saliences agree
    assert 'class="notice"' not in html
    [(source, alternative)] = re.findall(r'<img class="picture" src="([^"]*)" alt="([^"]*)">', html)
    assert unescape(alternative) == f"[Image #0 Caption] {CAPTION}"
    picture = base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))
    assert Picture.open(io.BytesIO(picture), formats=["JPEG"]).size == (240, 120)
