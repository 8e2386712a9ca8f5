"""Which hidden states are captured, which tokens are kept, and edits of the stream.

What edits lead to is tested in `test_splice` and `test_steer`, with DeepStack, against models edited by other means.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sae import ActivationError, LayerError
from sae.harvest import HarvestStats, TokenChoice, harvest
from sae.hooks import find_blocks, hidden_states, resolve_layers

IDS = torch.tensor([[1, 10, 11, 12, 2, 0, 0], [1, 20, 21, 22, 23, 24, 2]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_every_layer_equals_output_hidden_states(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    expected = model(**INPUTS, output_hidden_states=True).hidden_states
    count = len(find_blocks(model))
    layers = list(range(count, -1, -1))
    got = hidden_states(model, layers, **INPUTS)
    assert list(got) == layers
    assert all(torch.equal(got[layer], expected[layer]) for layer in range(count))
    # transformers gives its last entry after the final norm, where the model has one
    last = model.transformer.ln_f(got[count]) if name == "gpt2" else got[count]
    torch.testing.assert_close(last, expected[count], rtol=0, atol=1e-12)


def test_layers_by_number_or_name(qwen3_vl: Any, gpt2: Any, bert: Any) -> None:
    names = ["last", 0, "2", "blocks.1.hook_resid_pre", "model.language_model.layers.0"]
    assert resolve_layers(qwen3_vl, names) == [0, 1, 2, 4]
    assert resolve_layers(gpt2, ["transformer.h.2", "embeddings"]) == [0, 3]
    with pytest.raises(LayerError, match=r"'model\.visual\.blocks\.0' names no layer of Qwen3VL"):
        resolve_layers(qwen3_vl, ["model.visual.blocks.0"])
    with pytest.raises(LayerError, match=r"layers 0 \(embeddings\) to 3"):
        hidden_states(bert, [5], **INPUTS)


def test_padding_special_tokens_and_sinks_are_dropped(bert: Any) -> None:
    stats, states = HarvestStats(), hidden_states(bert, [1, 3], **INPUTS)
    [batch] = harvest(bert, [INPUTS], [1, 3], special_ids=[1, 2], stats=stats)
    assert IDS[batch.rows, batch.positions].tolist() == [10, 11, 12, 20, 21, 22, 23, 24]
    assert all(torch.equal(h, states[layer][batch.rows, batch.positions]) for layer, h in batch.activations.items())
    assert (stats.tokens, stats.kept, stats.padding, stats.special, stats.sinks) == (14, 8, 2, 4, 0)
    states[3][0, 2] *= 30  # a sink at one layer alone
    states[3][1, 1] *= 5
    states[1][IDS == 0] = torch.nan
    keep, wanted, _ = TokenChoice(bert, special_ids=[1, 2])(IDS, INPUTS["attention_mask"], states)
    assert (wanted & ~keep).nonzero().tolist() == [[0, 2]]


def test_visual_tokens_are_kept_and_have_a_median_of_their_own(qwen3_vl: Any, picture: Any) -> None:
    ids, mask, states = picture["input_ids"], picture["attention_mask"], hidden_states(qwen3_vl, [2], **picture)
    states[2][ids == 45] *= 50
    # tokenizers list <|image_pad|> among their special tokens
    keep, _, visual = TokenChoice(qwen3_vl, special_ids=[45, 47, 48])(ids, mask, states)
    assert torch.equal(visual, ids == 45)
    assert torch.equal(keep, mask.bool() & (ids != 47) & (ids != 48))


def test_values_that_are_not_finite_name_batch_and_layer(bert: Any) -> None:
    broken = copy.deepcopy(bert)
    broken.embeddings.word_embeddings.weight[30] = torch.inf
    with pytest.raises(ActivationError, match="batch 1: hidden states of layer 3 are not finite"):
        list(harvest(broken, [INPUTS, {**INPUTS, "input_ids": IDS.where(IDS != 10, 30)}], [3]))
