"""Which hidden states are captured, which tokens are kept, and edits of the stream.

What edits lead to is tested in `test_splice` and `test_steer`, with DeepStack, against models edited by other means.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ActivationError, LayerError, ShapeError
from sae.harvest import HarvestStats, harvest
from sae.hooks import find_blocks, hidden_states, resolve_layers

IDS = torch.tensor([[1, 10, 11, 12, 2, 0, 0], [1, 20, 21, 22, 23, 24, 2]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2"])
def test_every_layer_equals_output_hidden_states(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    with torch.no_grad():
        expected = model(**INPUTS, output_hidden_states=True).hidden_states
        count = len(find_blocks(model))
        layers = list(range(count, -1, -1))
        got = hidden_states(model, layers, **INPUTS)
    assert list(got) == layers
    assert all(torch.equal(got[layer], expected[layer]) for layer in range(count))
    # transformers gives its last entry after the final norm, where the model has one
    final = {"bert": lambda h: h, "qwen3": lambda h: model.model.norm(h), "gpt2": lambda h: model.transformer.ln_f(h)}
    torch.testing.assert_close(final[name](got[count]), expected[count], rtol=0, atol=1e-12)


def test_layers_by_number_or_name(qwen3_vl: Any, gpt2: Any, bert: Any) -> None:
    names = ["last", 0, "2", "blocks.1.hook_resid_pre", "model.language_model.layers.0"]
    assert resolve_layers(qwen3_vl, names) == [0, 1, 2, 4]
    assert resolve_layers(gpt2, ["transformer.h.2", "embeddings"]) == [0, 3]
    with pytest.raises(LayerError, match=r"'model\.visual\.blocks\.0' names no layer of Qwen3VL"):
        resolve_layers(qwen3_vl, ["model.visual.blocks.0"])
    with pytest.raises(LayerError, match=r"layers 0 \(embeddings\) to 3"):
        hidden_states(bert, [5], **INPUTS)


def patched(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `harvest` see hidden states that are changed in place, by `change(states, inputs)`."""

    def states(model: Any, layers: Any, **inputs: Any) -> dict[int, Tensor]:
        found = {layer: h.clone() for layer, h in hidden_states(model, layers, **inputs).items()}
        change(found, inputs)
        return found

    patch.setattr("sae.harvest.hidden_states", states)


def test_padding_special_tokens_and_sinks_are_dropped(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(states: dict[int, Tensor], inputs: dict[str, Any]) -> None:
        states[3][0, 2] *= 30  # a sink at one layer alone
        states[3][1, 1] *= 5
        states[1][inputs["attention_mask"] == 0] = torch.nan

    stats, expected = HarvestStats(), hidden_states(bert, [1], **INPUTS)[1]
    patched(monkeypatch, change)
    [batch] = harvest(bert, [INPUTS], [1, 3], special_ids=[1, 2], stats=stats)
    assert IDS[batch.rows, batch.positions].tolist() == [10, 12, 20, 21, 22, 23, 24]
    assert torch.equal(batch.activations[1], expected[batch.rows, batch.positions])
    assert len(batch.activations[3]) == 7
    assert (stats.tokens, stats.kept, stats.padding, stats.special, stats.sinks) == (14, 7, 2, 4, 1)
    [all_kept] = harvest(bert, [INPUTS], [1, 3], special_ids=[1, 2], sink_factor=None)
    assert len(all_kept.rows) == 8


def test_visual_tokens_are_kept_and_have_a_median_of_their_own(qwen3_vl: Any, picture: Any, monkeypatch: Any) -> None:
    def loud(states: dict[int, Tensor], inputs: dict[str, Any]) -> None:
        states[2][inputs["input_ids"] == 45] *= 50

    patched(monkeypatch, loud)
    # tokenizers list <|image_pad|> among their special tokens
    [batch] = harvest(qwen3_vl, [picture], [2], special_ids=[45, 47, 48])
    tokens = picture["input_ids"][batch.rows, batch.positions]
    assert batch.visual.tolist() == (tokens == 45).tolist()
    assert int(batch.visual.sum()) == 6
    assert not set(tokens.tolist()) & {0, 47, 48}


def test_values_that_are_not_finite_name_batch_and_layer(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(states: dict[int, Tensor], inputs: dict[str, Any]) -> None:
        if int(inputs["input_ids"][0, 1]) == 30:
            states[3][1, 2, 0] = torch.inf

    patched(monkeypatch, broken)
    batches = [INPUTS, {**INPUTS, "input_ids": IDS.where(IDS != 10, 30)}, INPUTS]
    with pytest.raises(ActivationError, match="batch 1: hidden states of layer 3 are not finite"):
        list(harvest(bert, batches, [1, 3]))
    with pytest.raises(ShapeError, match="batch 0"):
        list(harvest(bert, [{**INPUTS, "attention_mask": torch.ones(2, 1, 7, 7)}], [1]))
