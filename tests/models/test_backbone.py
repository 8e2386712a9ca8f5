"""Loading, positions and hidden states of vision-language models, causal models and encoders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import T5Config

from remind.core.errors import ModelError
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import paths_of
from remind.models.images import Pictures
from remind.models.nano import save_nano

TEXT = "Ana: I've dropped bouldering for good.\nBen: Is that so?\n"


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained")


@pytest.fixture(scope="module")
def minilm() -> Backbone:
    return load_backbone("minilm")


@pytest.fixture(scope="module")
def nano_folder(tmp_path_factory) -> Path:
    return save_nano(tmp_path_factory.mktemp("models") / "nano")


def question(folder: Path, *sizes: tuple[int, int]) -> list[dict]:
    """A message of images, and of text that looks like one."""
    parts = []
    for number, size in enumerate(sizes):
        Image.new("RGB", size, "red").save(folder / f"{number}.png")
        parts.append({"type": "image", "image": str(folder / f"{number}.png")})
    return [*parts, {"type": "text", "text": "What is it? <|image_pad|>"}]


def ids_of(backbone: Backbone, text: str = TEXT) -> torch.Tensor:
    return torch.tensor([backbone.tokenize(text).ids])


# hidden states


@pytest.mark.parametrize("name", ["nano", "minilm"])
def test_hidden_states_are_those_of_the_library(name, request):
    backbone = request.getfixturevalue(name)
    ids = ids_of(backbone)
    states = backbone.hidden_states(ids, torch.ones_like(ids), [3, 0, 1])
    with torch.no_grad():
        expected = backbone.model(ids, output_hidden_states=True).hidden_states
    for layer, state in states.items():
        torch.testing.assert_close(state, expected[layer])


# positions and images


def expected_positions(ids: list[int], grids: list[list[int]], image_token: int) -> list[list[int]]:
    """Qwen3-VL's multimodal positions, from their definition: a text token advances all three axes by one, an image
    spans its merged grid and moves on by its longer side."""
    axes: list[list[int]] = [[], [], []]
    position, cursor, grids = 0, 0, list(grids)
    while cursor < len(ids):
        if ids[cursor] != image_token:
            for axis in axes:
                axis.append(position)
            position, cursor = position + 1, cursor + 1
            continue
        frames, height, width = grids.pop(0)
        height, width = height // 2, width // 2
        for frame in range(frames):
            for row in range(height):
                for column in range(width):
                    for axis, value in zip(axes, (frame, row, column), strict=True):
                        axis.append(position + value)
        cursor += frames * height * width
        position += max(height, width)
    return axes


def test_positions_of_images(nano, tmp_path):
    parts, pictures = question(tmp_path, (200, 90), (64, 190)), Pictures(nano, None)
    ids = pictures.ids(nano.tokenizer, parts)
    inputs = {"input_ids": torch.tensor([ids]), **pictures.tensors(paths_of(parts))}
    expected = expected_positions(ids, inputs["image_grid_thw"].tolist(), nano.model.config.image_token_id)
    positions = nano.position_ids(inputs)
    assert positions[:, 0].tolist() == expected


# what is refused


def refused(name, pattern: str, **options) -> None:
    with pytest.raises(ModelError, match=pattern) as caught:
        load_backbone(name, **options)
    assert "\n" not in str(caught.value)


def without_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda f: (f / "config.json").write_text("{"), "configuration"),
        (lambda f: T5Config(architectures=["T5"]).save_pretrained(f), "T5 is neither"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "names no base model"),
        (lambda f: os.truncate(f / "model.safetensors", 1000), "weights cannot be loaded"),
        (without_a_tensor, r"1 tensors are missing.*model\.language_model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda f: [(f / f"tokenizer{end}.json").unlink() for end in ("", "_config")], "is tokenizer.json missing"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "processor cannot be loaded"),
    ],
)
def test_damaged_folders(nano_folder, tmp_path, damage, pattern):
    folder = Path(shutil.copytree(nano_folder, tmp_path / "copy"))
    damage(folder)
    refused(folder, pattern)


def test_bad_names_dtypes_devices_and_layers(nano):
    refused("/nowhere/gone", "gone: no such folder")
    refused("nobody/no-such-model", "nobody/no-such-model: no usable model configuration")
    refused("nano", "dtype", dtype="int8")
    refused("nano", "device 'nonsense'", device="nonsense")
    with pytest.raises(ModelError, match=r"^nano-untrained: [^\n]*0[^\n]*4[^\n]*$"):
        nano.hidden_states(ids_of(nano), None, [5])
