"""Training on states with images as pixels: the tokens, the loss, a trained tower, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pictured import pictured_records
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from remind import PRAConfig
from remind.alignment.config import LoraConfig
from remind.alignment.examples import Example, examples_of
from remind.core.errors import ConfigError, ImagePathError
from remind.models.backbone import Backbone, load_backbone
from remind.models.images import Pictures
from remind.states.records import StateRecord
from remind.train_pra.config import DataConfig, ExportConfig
from remind.train_pra.export import export
from remind.train_pra.run import train

PIXELS: dict[str, Any] = {"images": "pixels", "image_tokens": 64}


@pytest.fixture
def records(tmp_path: Path) -> list[StateRecord]:
    return pictured_records(tmp_path / "data")


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained")


def shown(nano: Backbone, records: list[StateRecord], tokens: int = 64) -> list[Example]:
    return examples_of(nano.tokenizer, records, Pictures(nano, tokens, None))


def test_images_stand_where_their_captions_stood(records: list[StateRecord], nano: Backbone) -> None:
    example = shown(nano, records)[0]
    # 96 x 64 and 64 x 128 pixels, 32 x 32 to a token
    red, blue = (f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (6, 8))
    for prompt, level in zip(example.prompts, (records[0].x0, records[0].x1, records[0].x2), strict=True):
        text = level.text.replace("#0 Caption] a red bike", f"#0 Caption] {red}")
        text = text.replace("#2 Caption] (no caption)", f"#2 Caption] {blue}")
        assert nano.tokenizer.decode(prompt) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        # what Ana wrote is text
        assert prompt.tolist().count(nano.model.config.image_token_id) == 14
    assert example.pixels()["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 4]]


def test_the_loss_is_that_of_the_model_itself(records: Any, nano: Backbone, tmp_path: Path, runs: Any) -> None:
    """Against the model's own forward and the image processor's own pixels."""
    example = shown(nano, records)[0]
    images = [Image.open(tmp_path / "data" / name) for name in ("red.png", "blue.png")]
    pixels = nano.processor.image_processor(images=images, return_tensors="pt")
    ids = torch.cat([example.prompts[0], example.answer]).long()[None]
    extra = {"mm_token_type_ids": (ids == nano.model.config.image_token_id).int(), **pixels}
    with torch.no_grad():
        logits = nano.model(input_ids=ids, **extra).logits[0, len(example.prompts[0]) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, example.answer.long())
    found = runs.trainer(tmp_path / "r", records[1:3], records[:1], **PIXELS).evaluate()["eval_ce0"]
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_an_image_that_cannot_be_used_is_named(records: list[StateRecord], nano: Backbone, tmp_path: Path) -> None:
    file = tmp_path / "data" / "red.png"
    file.write_text("not a picture")
    with pytest.raises(ImagePathError, match=r"set images captions[^\n]*$") as caught:
        shown(nano, records[:3])
    assert str(caught.value).startswith(f"{file.resolve()} [q0]: ")
    assert len(examples_of(nano.tokenizer, records)) == 4


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)], ids=["full", "lora"])
def test_a_trained_tower_is_exported(lora: Any, records: Any, tmp_path: Path, runs: Any, make_states: Any) -> None:
    states, first = make_states(tmp_path / "states", records), load_backbone("nano-untrained").model.model.visual
    data = DataConfig(**PIXELS, train_vision=True)
    out = train(runs.config(states, tmp_path / "r", data=data, lora=lora, batch_size=3, max_steps=2))
    saved = load_file(out / "checkpoint-2" / ("model.safetensors" if lora is None else "adapter_model.safetensors"))
    stored = {name.split("visual.")[1].split("default.")[-1]: p for name, p in saved.items() if "visual." in name}
    assert stored.keys() == dict(first.named_parameters()).keys()
    assert not torch.equal(stored["patch_embed.proj.weight"], first.patch_embed.proj.weight)
    folder = export(ExportConfig(run=str(out), out=str(tmp_path / "x")))
    opened: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    for name, parameter in opened.model.visual.named_parameters():
        assert torch.equal(parameter, stored[name]), name


def test_what_pixels_cannot_do_is_refused(records: Any, tmp_path: Path, monkeypatch: Any, runs: Any) -> None:
    def refused(message: str, rows: list[StateRecord], **settings: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^{message}[^\n]*$"):
            runs.trainer(tmp_path / "r", rows, **PIXELS | {"batch_size": 2} | settings)

    with pytest.raises(ConfigError, match="minilm takes no images"):
        Pictures(load_backbone("minilm"), 64)
    refused(r"train_vision: [^\n]*images pixels", records, images="captions", train_vision=True)
    # no process may share a prefix that another one cannot
    monkeypatch.setattr(PRAConfig, "sharded", True)
    refused(r"images pixels: [^\n]* prefix_sharing false", records)
