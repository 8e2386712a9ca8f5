"""Small policies with random weights: one of eight tokens, pico in a folder, and one that chats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.memory_training import pico
from remind.models.backbone import Backbone, backbone_of
from remind.models.nano import nano_folder, nano_tokenizer

#: Tokens of images by field of a configuration.
MARKS = {
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


def qwen3(tokenizer: Any, size: int, words: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2, "head_dim": size // 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=words, **sizes, **heads, **ids))


@pytest.fixture
def policy() -> Backbone:
    """Token 0 pads, 1 ends."""
    return backbone_of(qwen3(pico.tokenizer(), 16, 8), pico.tokenizer(), "tiny")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a smaller pico."""
    folder = tmp_path_factory.mktemp("small") / "pico"
    for part in pico.make_pico(0, layers=2, hidden_size=32):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that chats: nano's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = nano_tokenizer()
    for part in (tokenizer, qwen3(tokenizer, 32, len(tokenizer))):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory: pytest.TempPathFactory, chat: Path) -> Path:
    """A folder with a Qwen3.5, which sees images, of a layer of linear and one of full attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    folder = shutil.copytree(chat, tmp_path_factory.mktemp("qwen35") / "model")
    shutil.copy(nano_folder() / "preprocessor_config.json", folder)
    tokenizer, size = nano_tokenizer(), {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    linear |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope}
    marks = {name: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in MARKS.items()}
    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config={"vocab_size": len(tokenizer), **size, **linear, **heads, **kinds},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        **marks,
    )
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    return folder
