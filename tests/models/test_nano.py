"""The nano backbone: its tokenizer round-trips, its model is wired like a Qwen3-VL."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from remind.models.nano import (
    nano_model,
    nano_tokenizer,
    save_nano,
)


@pytest.fixture(scope="module")
def tokenizer():
    return nano_tokenizer()


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from(["e\u0301 \u00e9", "👩‍👩‍👧‍👦 ok", "  two  spaces , kept .", "I 'm , don 't"]))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_weights_depend_on_the_seed_alone():
    small = {"hidden_size": 64, "layers": 3, "heads": 2, "kv_heads": 1}
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    one = nano_model(seed=1, **small)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(456)
    again, other = nano_model(seed=1, **small), nano_model(seed=2, **small)
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert not torch.equal(one.model.language_model.embed_tokens.weight, other.model.language_model.embed_tokens.weight)
    assert len(one.model.language_model.layers) == 3


def test_saved_folder_opens_as_plain_hugging_face(tmp_path, tokenizer):
    folder = save_nano(tmp_path / "model")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.safetensors", "tokenizer.json", "preprocessor_config.json", "generation_config.json"}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, use_safetensors=True)
    assert model.config.architectures == ["Qwen3VLForConditionalGeneration"]
    reference = nano_model().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference[name]), name
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "Ana: e\u0301 and é 👋 <|im_end|>\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    config = model.generation_config
    assert tokenizer.eos_token_id in config.eos_token_id
    assert (config.pad_token_id, config.do_sample) == (tokenizer.pad_token_id, False)
