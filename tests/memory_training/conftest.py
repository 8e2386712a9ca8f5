"""Small policies: one of eight words, pico in a folder, and one that chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from two_roles import END, PAD, WORDS, save_chat

from remind.memory_training import pico
from remind.models.backbone import Backbone, backbone_of


@pytest.fixture
def policy() -> Backbone:
    """A few thousand random weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=8, **sizes, **heads, pad_token_id=PAD, eos_token_id=END, bos_token_id=None)
    return backbone_of(Qwen3ForCausalLM(config), tokenizer, "tiny")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a smaller pico."""
    folder = tmp_path_factory.mktemp("small") / "pico"
    for part in pico.make_pico(0, layers=2, hidden_size=32):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    save_chat(folder)
    return folder
