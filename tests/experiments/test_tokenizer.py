"""The tokenizer of the nano backbone: training again gives the shipped bytes, and wordings are one token each."""

from __future__ import annotations

from experiments.pretrain.tokenizer import train_tokenizer, training_texts, wordings
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
