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
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    # as they come, heads of linear attention take a minute
    sizes |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    sizes |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    text = {"vocab_size": len(nano_tokenizer()), "layer_types": ["linear_attention", "full_attention"], **sizes}
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config={"num_hidden_layers": 2, **text}, vision_config=seen)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    return folder
