"""A task of two roles whose episodes differ in length, in eight words; and a small model that chats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remind.memory_training.episodes import Prompt, Scores
from remind.models.nano import nano_tokenizer

WORDS = ("<pad>", "<end>", "a", "b", "c", "d", "e", "f")
PAD, END = 0, 1


class TwoRoles:
    """`first` completes one prompt; `second` then one prompt for each `a` (id 2) of it, two at most."""

    def __len__(self) -> int:
        return 40

    def episode(self, row: int) -> Any:
        (reply,) = yield [Prompt("first", [3 + row % 4, 4])]
        count = min(reply.count(2), 2)
        replies = (yield [Prompt("second", [5, 6, *reply[:1]])] * count) if count else []
        return [reply, *replies]

    def score(self, row: int, outcomes: Sequence[list[list[int]]]) -> Any:
        worth = [float(sum(text.count(2) for text in outcome)) for outcome in outcomes]
        return Scores({"first": worth, "second": worth}, {"first": [4.0] * len(worth)}, metrics={"a": sum(worth)})


def save_chat(folder: str | Path, layers: int = 2) -> None:
    """A Qwen3 with random weights that chats: nano's tokenizer and chat template."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = nano_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
