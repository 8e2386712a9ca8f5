"""The nano backbone: its tokenizer round-trips, its model is wired like a Qwen3-VL."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from remind.models.nano import nano_model, nano_tokenizer, save_nano


@pytest.fixture(scope="module")
def tokenizer():
    return nano_tokenizer()


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from(["e\u0301 \u00e9", "👩‍👩‍👧‍👦 ok", "  two  spaces , kept .", "I 'm , don 't"]))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_saved_folder_opens_as_plain_hugging_face(tmp_path, tokenizer):
    folder = save_nano(tmp_path / "model")
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, use_safetensors=True)
    reference = nano_model().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference[name]), name
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "Ana: e\u0301 and é 👋 <|im_end|>\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
