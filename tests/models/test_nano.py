"""The nano backbone: its tokenizer round-trips, its model is wired like a Qwen3-VL."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.models.nano import nano_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return nano_tokenizer()


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from(["e\u0301 \u00e9", "👩‍👩‍👧‍👦 ok", "  two  spaces , kept .", "I 'm , don 't"]))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
