"""The tokenizer of the nano backbone: training again gives the shipped bytes, and wordings are one token each."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from experiments.pretrain.tokenizer import pattern, train_tokenizer, training_texts, wordings
from remind.models.nano import nano_folder, nano_tokenizer
from remind.testbed.lexicon import lexicon

SHIPPED = (nano_folder() / "tokenizer.json").read_text(encoding="utf-8")


def test_training_again_gives_the_shipped_bytes_and_other_text_does_not():
    texts = list(training_texts())
    assert train_tokenizer(texts, wordings()) + "\n" == SHIPPED
    assert train_tokenizer(texts[:-50], wordings()) + "\n" != SHIPPED


def test_wordings_are_distinct_and_one_token_each():
    texts = wordings()
    assert len(texts) == len(set(texts))
    for words in lexicon()["dimensions"].values():
        for entry in words["values"].values():
            assert {text for kind in ("label", "gist", "cues", "fits") for text in entry.get(kind, ())} <= set(texts)
    tokenizer = nano_tokenizer()
    assert {text: n for text in texts if (n := len(tokenizer(text)["input_ids"])) != 1} == {}


def _flat(texts: list[str]) -> str:
    """One way after the other, the longest first: slow, and plain to see what it finds."""
    ways = []
    for text in sorted(texts, key=len, reverse=True):
        before = r"(?<!\p{L})" if text[0].isalpha() else ""
        after = r"(?!\p{L})" if text[-1].isalpha() else ""
        ways.append(before + re.escape(text).replace("\\\n", r"\n") + after)
    names = "|".join(lexicon()["names"])
    return "|".join([*ways, f"(?<={names}): ", "(?<=[A-D]),(?=[A-D])"])


@pytest.fixture(scope="module")
def splits():
    """Where the flat pattern cuts a text, and where the shipped one does."""
    flat, shipped = (Split(Regex(f(wordings())), behavior="isolated") for f in (_flat, pattern))
    return flat.pre_tokenize_str, shipped.pre_tokenize_str


_PIECE = st.one_of(
    st.sampled_from(wordings()),
    st.sampled_from(wordings()).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])),
    st.sampled_from(wordings()).flatmap(lambda text: st.integers(0, len(text)).map(lambda start: text[start:])),
    st.sampled_from([" ", "\n", ",", ": ", "A", "B,C", "Ana: ", "Anas: ", "é", "中", "1", "'s"]),
)


@settings(max_examples=500, deadline=None)
@given(text=st.lists(_PIECE, max_size=12).map("".join))
def test_the_pattern_finds_what_one_way_after_the_other_finds(splits, text):
    flat, shipped = splits
    assert shipped(text) == flat(text)
