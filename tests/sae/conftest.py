"""Tiny models with random weights, built from their configurations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor


def _eval(model: Any) -> Any:
    return model.double().eval().requires_grad_(False)


@pytest.fixture(scope="session")
def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
    return _eval(BertModel(config))


@pytest.fixture(scope="session")
def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    return _eval(GPT2LMHeadModel(config))


IMAGE = 45


@pytest.fixture(scope="session")
def qwen3_vl() -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    from remind.models.nano import nano_config

    torch.manual_seed(0)
    # as many vision blocks as text blocks, so that counting alone cannot tell the stacks apart
    config = nano_config(hidden_size=32, layers=4, vision_size=16)
    config.vision_config.depth = 4
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = IMAGE, 47, 48
    return _eval(Qwen3VLForConditionalGeneration(config))


@pytest.fixture(scope="session")
def picture() -> dict[str, Any]:
    """Two texts for `qwen3_vl`, the first with an image of 2 x 3 tokens, the second padded on the right."""
    ids = torch.tensor([[5, 6, 47, *[IMAGE] * 6, 48, 7, 8], [9, 10, 11, 12, 13, *[0] * 7]])
    pixels = torch.randn(24, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


VOCABULARY = """the a cat dog bird sat ran saw on under mat tree house red green blue old new quickly slowly
and or but he she it they was were is not very big small"""
WORDS = VOCABULARY.split()


@pytest.fixture(scope="session")
def make_tokenizer() -> Any:
    """Tokenizers of whole words for the models above: [PAD] 0, [BOS] 1, [EOS] 2, [UNK] 3, WORDS from 4; case folds."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(padding_side: str = "right") -> Any:
        names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        vocabulary = {token: i for i, token in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
        )
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=padding_side, **names)

    return make


@pytest.fixture(scope="session")
def make_coder() -> Any:
    """Float64 coders with random weights, rows of several lengths and biases, so that units and offsets matter."""
    from sae import TopKSAE

    def make(d_in: int, d_sae: int = 48, k: int = 4, seed: int = 0) -> TopKSAE:
        coder = TopKSAE(d_in, d_sae, k, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            coder.W_dec.mul_(torch.linspace(0.5, 2, d_sae)[:, None])
            coder.b_dec.add_(torch.linspace(-0.1, 0.1, d_in))
            coder.b_enc.add_(torch.linspace(0.1, -0.1, d_sae))
        return coder.double().eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_texts() -> Any:
    """Texts of 1 to `longest` random WORDS."""

    def make(count: int, longest: int) -> list[str]:
        draw = random.Random(0)
        return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]

    return make


@contextmanager
def _replaced(model: Any, edits: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    from sae.hooks import find_blocks

    text = getattr(model, "transformer", None) or getattr(model.model, "language_model", model.model)
    modules = [*find_blocks(model), text.ln_f if hasattr(text, "ln_f") else text.norm]
    with ExitStack() as stack:
        for layer, edit in edits.items():
            wrapped = partial(_edited, modules[layer].forward, edit)
            stack.enter_context(mock.patch.object(modules[layer], "forward", wrapped))
        yield


def _edited(forward: Any, edit: Callable[[Tensor], Tensor], h: Tensor, *args: Any, **kwargs: Any) -> Any:
    return forward(edit(h), *args, **kwargs)


@pytest.fixture(scope="session")
def replaced() -> Any:
    """replaced(model, edits): what `sae.hooks.edited` does, by wrapping the forwards of blocks and final norm."""
    return _replaced


@pytest.fixture(scope="session")
def dense() -> Any:
    """dense(coder, h): codes [..., d_sae] (Eq. 2), from a full sort; of equals the first."""

    def encode(coder: Any, h: Tensor) -> Tensor:
        pre = ((h - coder.b_dec) @ coder.W_enc + coder.b_enc).relu()
        kept = pre.sort(dim=-1, descending=True, stable=True).indices[..., : coder.k]
        return torch.zeros_like(pre).scatter(-1, kept, pre.gather(-1, kept))

    return encode
