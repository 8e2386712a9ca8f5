"""Which tokens are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ActivationError, ShapeError
from sae.harvest import HarvestStats, harvest
from sae.hooks import hidden_states


@contextmanager
def altered(change: Callable[[dict[int, Tensor], dict[str, Any]], dict[int, Tensor]]) -> Iterator[None]:
    """Within the block `harvest` sees changed hidden states: change(states, inputs)."""

    def states(model: Any, layers: Any, **inputs: Any) -> dict[int, Tensor]:
        return change({k: v.clone() for k, v in hidden_states(model, layers, **inputs).items()}, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sae.harvest.hidden_states", states)
        yield


def text_batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 10, 11, 12, 2, 0, 0], [1, 20, 21, 22, 23, 24, 2]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_padding_and_special_tokens_are_dropped(bert: Any) -> None:
    stats = HarvestStats()
    [batch] = harvest(bert, [text_batch()], [1, 3], special_ids=[1, 2], sink_factor=None, stats=stats)
    kept = text_batch()["input_ids"][batch.rows, batch.positions]
    assert kept.tolist() == [10, 11, 12, 20, 21, 22, 23, 24]
    states = hidden_states(bert, [1, 3], **text_batch())
    for layer in (1, 3):
        assert torch.equal(batch.activations[layer], states[layer][batch.rows, batch.positions])
    assert not bool(batch.visual.any())
    assert (stats.tokens, stats.kept, stats.padding, stats.special, stats.sinks) == (14, 8, 2, 4, 0)


def test_values_at_padding_may_be_anything(bert: Any) -> None:
    def poisoned(states: dict[int, Tensor], inputs: dict[str, Any]) -> dict[int, Tensor]:
        return {k: v.masked_fill(inputs["attention_mask"][..., None] == 0, float("nan")) for k, v in states.items()}

    with altered(poisoned):
        [batch] = harvest(bert, [text_batch()], [2])
    assert bool(torch.isfinite(batch.activations[2]).all())


def test_a_sink_at_one_layer_is_dropped_for_all(bert: Any) -> None:
    def with_sink(states: dict[int, Tensor], _: Any) -> dict[int, Tensor]:
        states[3][0, 2] *= 30
        states[3][1, 1] *= 5
        return states

    stats = HarvestStats()
    with altered(with_sink):
        [batch] = harvest(bert, [text_batch()], [1, 3], special_ids=[1, 2], stats=stats)
        [all_kept] = harvest(bert, [text_batch()], [1, 3], special_ids=[1, 2], sink_factor=None)
    places = list(zip(batch.rows.tolist(), batch.positions.tolist(), strict=True))
    assert (0, 2) not in places
    assert (1, 1) in places
    assert len(batch.activations[1]) == len(batch.activations[3]) == 7
    assert len(all_kept.rows) == 8
    assert stats.sinks == 1


def test_visual_tokens_are_flagged_and_kept(qwen3_vl: Any, picture: dict[str, Any]) -> None:
    stats = HarvestStats()
    # tokenizers list <|image_pad|> among their special tokens
    [batch] = harvest(qwen3_vl, [picture], [2], special_ids=[45, 47, 48], sink_factor=None, stats=stats)
    tokens = picture["input_ids"][batch.rows, batch.positions]
    assert batch.visual.tolist() == (tokens == 45).tolist()
    assert int(batch.visual.sum()) == stats.visual == 6
    assert not set(tokens.tolist()) & {0, 47, 48}
    torch.testing.assert_close(
        batch.activations[2], hidden_states(qwen3_vl, [2], **picture)[2][batch.rows, batch.positions]
    )


def test_visual_tokens_have_a_median_of_their_own(qwen3_vl: Any, picture: dict[str, Any]) -> None:
    def loud_pictures(states: dict[int, Tensor], inputs: dict[str, Any]) -> dict[int, Tensor]:
        return {k: torch.where(inputs["input_ids"][..., None] == 45, 50 * v, v) for k, v in states.items()}

    with altered(loud_pictures):
        [batch] = harvest(qwen3_vl, [picture], [2])
    assert int(batch.visual.sum()) == 6


def test_values_that_are_not_finite_name_batch_and_layer(bert: Any) -> None:
    def broken(states: dict[int, Tensor], inputs: dict[str, Any]) -> dict[int, Tensor]:
        if int(inputs["input_ids"][0, 1]) == 30:
            states[3][1, 2, 0] = float("inf")
        return states

    batches = [text_batch() for _ in range(3)]
    batches[1]["input_ids"][0, 1] = 30
    stats = HarvestStats()
    with altered(broken):
        with pytest.raises(ActivationError, match="batch 1: hidden states of layer 3 are not finite"):
            list(harvest(bert, batches, [1, 3]))
        assert [batch.batch for batch in harvest(bert, batches, [1, 3], skip_nonfinite=True, stats=stats)] == [0, 2]
    assert (stats.batches, stats.skipped) == (3, 1)
    batches[0]["attention_mask"] = torch.ones(2, 1, 7, 7)
    with pytest.raises(ShapeError, match="batch 0"):
        list(harvest(bert, batches, [1]))
