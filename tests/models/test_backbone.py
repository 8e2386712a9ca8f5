"""Loading, positions and hidden states of models of every kind, those stored as GGUF too; and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import T5Config

from remind.core.errors import ModelError
from remind.models import backbone as loading
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
        (lambda f: os.truncate(f / "model.safetensors", 1000), "weights cannot be loaded"),
        (without_a_tensor, r"1 tensors are missing.*model\.language_model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda f: [(f / f"tokenizer{end}.json").unlink() for end in ("", "_config")], "is tokenizer.json missing"),
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


LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "og"]


def write_gguf(path: Path, model) -> Path:
    """A Llama model as llama.cpp stores it: rows of the query and key projections interleaved by halves of a head."""
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'remind-toolkit[smollm2]'")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*LETTERS, "<end>"])
    writer.add_token_types([1] * len(LETTERS) + [3])
    writer.add_token_merges(["o g"])
    writer.add_eos_token_id(len(LETTERS))
    writer.add_bos_token_id(len(LETTERS))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(LETTERS) + 1, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_converted_model_computes_what_the_original_computes(llama, tmp_path, cache):
    file = write_gguf(tmp_path / "tiny.gguf", llama)
    backbone = load_backbone(str(file))
    assert backbone.kind == "causal"
    ids = backbone.tokenizer("a dog, said Bob", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(backbone.model(ids).logits, llama(ids).logits)


def test_a_cut_file_is_one_line_and_leaves_nothing(llama, tmp_path, cache):
    file = write_gguf(tmp_path / "model.gguf", llama)
    os.truncate(file, file.stat().st_size // 2)
    refused(str(file), f"{file}: not a GGUF model")
    assert not [path for path in cache.iterdir() if path.is_dir()]
