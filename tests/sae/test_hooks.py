"""Captured layers against transformers' own hidden states; edits of the stream.

What edits lead to is tested in `test_splice` and `test_steer`, with DeepStack, against models edited by other means.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sae import LayerError, ShapeError
from sae.hooks import edited, find_blocks, hidden_states, resolve_layers


def ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2"])
def test_every_layer_equals_output_hidden_states(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask, output_hidden_states=True).hidden_states
        count = len(find_blocks(model))
        layers = list(range(count, -1, -1))
        got = hidden_states(model, layers, input_ids=ids(), attention_mask=mask)
    assert list(got) == layers
    assert len(expected) == count + 1
    for layer in range(count):
        assert torch.equal(got[layer], expected[layer])
    # transformers gives its last entry after the final norm, where the model has one
    final = {"bert": lambda h: h, "qwen3": lambda h: model.model.norm(h), "gpt2": lambda h: model.transformer.ln_f(h)}
    torch.testing.assert_close(final[name](got[count]), expected[count], rtol=0, atol=1e-12)


def test_the_language_stack_is_found(qwen3_vl: Any, qwen3: Any) -> None:
    assert find_blocks(qwen3_vl) is qwen3_vl.model.language_model.layers
    assert find_blocks(qwen3.model) is qwen3.model.layers
    with pytest.raises(LayerError, match="Linear has no configuration"):
        find_blocks(nn.Linear(2, 2))


def test_nothing_runs_beyond_the_deepest_layer(qwen3: Any) -> None:
    ran: list[str] = []
    model = copy.deepcopy(qwen3)
    for name, module in {"1": model.model.layers[1], "2": model.model.layers[2], "head": model.lm_head}.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    hidden_states(model, [0, 2], input_ids=ids())
    assert ran == ["1"]
    hidden_states(model, [4], input_ids=ids())
    assert ran == ["1", "1", "2"]


class TupleBlock(nn.Module):
    def forward(self, *, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states + 1, None


class TupleModel(nn.Module):
    """Blocks as in older transformers: keyword inputs, tuples as outputs."""

    config = SimpleNamespace(num_hidden_layers=2)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TupleBlock(), TupleBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x, _ = block(hidden_states=x)
        return x


def test_tuples_and_keyword_inputs() -> None:
    model = TupleModel()
    got = hidden_states(model, [0, 1, 2], x=torch.zeros(1, 2, 3))
    assert [float(got[layer].mean()) for layer in range(3)] == [0.0, 1.0, 2.0]
    with edited(model, {1: lambda h: 10 * h, 2: lambda h: h - 5}):
        assert float(model(torch.zeros(1, 2, 3)).mean()) == 10 * 1 + 1 - 5


@pytest.mark.parametrize("layers", [[5], [-1], [0, 9], [], [True]])
def test_layers_out_of_range(qwen3: Any, layers: list[int]) -> None:
    with pytest.raises(LayerError, match=r"layers 0 \(embeddings\) to 4") as caught:
        hidden_states(qwen3, layers, input_ids=ids())
    assert "\n" not in str(caught.value)
    with pytest.raises(LayerError, match=r"layers 0 \(embeddings\) to 4"), edited(qwen3, dict.fromkeys(layers, shift)):
        pass


def shift(h: Tensor) -> Tensor:
    """A change that differs from token to token."""
    return 0.5 * h + torch.arange(h.shape[1], dtype=h.dtype)[:, None] / 7


def test_hooks_are_gone_afterwards_also_after_an_error(qwen3: Any) -> None:
    def hooks() -> list[int]:
        return [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in qwen3.model.layers]

    before = hooks()
    with pytest.raises(TypeError):
        hidden_states(qwen3, [1, 4], input_ids="not a tensor")
    assert hooks() == before
    with torch.no_grad():
        expected = qwen3(ids()).logits
        with edited(qwen3, {0: shift, 4: shift}):
            assert not torch.equal(qwen3(ids()).logits, expected)
        assert torch.equal(qwen3(ids()).logits, expected)
        with (
            pytest.raises(ShapeError, match=r"edit of layer 2 made \[2, 16\] of \[2, 7, 16\]"),
            edited(qwen3, {2: lambda h: h[:, 0]}),
        ):
            qwen3(ids())
        with pytest.raises(ZeroDivisionError), edited(qwen3, {1: shift, 3: lambda h: h * (1 // 0)}):
            qwen3(ids())
        assert torch.equal(qwen3(ids()).logits, expected)


def test_gradients_and_dtypes(gpt2: Any) -> None:
    # (GPT-2, as Qwen's norms compute in float32)
    vector = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    with edited(gpt2, {2: lambda h: h + vector}):
        gpt2(ids()).logits.square().sum().backward()
        assert hidden_states(gpt2, [2], input_ids=ids())[2].requires_grad
        with torch.no_grad():
            assert not hidden_states(gpt2, [2], input_ids=ids())[2].requires_grad
    step = 1e-5 * torch.eye(16, dtype=torch.float64)[3]
    losses = []
    for sign in (1, -1):
        with torch.no_grad(), edited(gpt2, {2: lambda h, sign=sign: h + sign * step}):
            losses.append(float(gpt2(ids()).logits.square().sum()))
    assert float(vector.grad[3]) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)
    clean = hidden_states(gpt2, [2], input_ids=ids())[2]
    with torch.no_grad(), edited(gpt2, {2: lambda h: h.float()}):
        got = hidden_states(gpt2, [2, 3], input_ids=ids())
    assert got[2].dtype == got[3].dtype == torch.float64
    assert torch.equal(got[2], clean.float().double())


def test_layers_by_number_or_name(qwen3_vl: Any, gpt2: Any) -> None:
    names = ["last", 0, "2", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "model.language_model.layers.0"]
    assert resolve_layers(qwen3_vl, names) == [0, 1, 2, 4]
    assert resolve_layers(gpt2, ["transformer.h.2", "embeddings"]) == [0, 3]
    with pytest.raises(LayerError, match=r"'model\.visual\.blocks\.0' names no layer of Qwen3VL"):
        resolve_layers(qwen3_vl, ["model.visual.blocks.0"])
    with pytest.raises(LayerError, match="layer 9 does not exist"):
        resolve_layers(qwen3_vl, ["9"])
