"""Two tiny text-only Qwen3 models with a chat template: one of random weights, one that always says the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from remind.models.nano import VOCAB_SIZE, nano_tokenizer

#: What the second model says; one token of its tokenizer.
SAYING = '{"equal": true}'


def _config(layers: int, width: int) -> Any:
    from transformers import Qwen3Config

    tokenizer = nano_tokenizer()
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        bos_token_id=None,
    )


def save_random(folder: Path) -> Path:
    """A model whose replies differ from prompt to prompt and mean nothing."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(_config(2, 64))
    # random weights of the usual size make every prompt's reply nearly the same
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(8)
    return _save(model, nano_tokenizer(), folder)


def save_saying(folder: Path) -> Path:
    """A model whose next token depends on the last one alone: after the line end of a prompt `SAYING`, then the end."""
    from transformers import Qwen3ForCausalLM

    tokenizer = nano_tokenizer()
    tokenizer.add_tokens([SAYING])
    chain = [tokenizer("\n", add_special_tokens=False)["input_ids"][-1]]
    chain += tokenizer.convert_tokens_to_ids([SAYING, "<|im_end|>"])
    assert max(chain) < VOCAB_SIZE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(_config(1, 256))
    with torch.no_grad():
        # nothing is added to the residual stream: it stays the embedding of the last token
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, following in itertools.pairwise(chain):
            model.lm_head.weight[following] = model.model.embed_tokens.weight[last]
    return _save(model, tokenizer, folder)


def _save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
