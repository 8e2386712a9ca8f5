"""Captured layers against transformers' own hidden states and against what DeepStack returns; edits of the stream."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sae import LayerError
from sae.errors import ShapeError
from sae.hooks import edited, find_blocks, hidden_states, resolve_layers


def ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2"])
@pytest.mark.parametrize("order", [False, True])
def test_every_layer_equals_output_hidden_states(name: str, order: bool, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask, output_hidden_states=True).hidden_states
        count = len(find_blocks(model))
        layers = list(range(count, -1, -1)) if order else list(range(count + 1))
        got = hidden_states(model, layers, input_ids=ids(), attention_mask=mask)
    assert list(got) == layers
    assert len(expected) == count + 1
    for layer in range(count):
        assert torch.equal(got[layer], expected[layer])
    # transformers gives its last entry after the final norm, where the model has one
    final = {"bert": lambda h: h, "qwen3": lambda h: model.model.norm(h), "gpt2": lambda h: model.transformer.ln_f(h)}
    torch.testing.assert_close(final[name](got[count]), expected[count], rtol=0, atol=1e-12)


def test_deepstack_additions_are_included(
    qwen3_vl: Any, picture: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: list[Tensor] = []
    text = qwen3_vl.model.language_model
    original = type(text)._deepstack_process

    def record(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        stream.append(original(self, *args, **kwargs))
        return stream[-1]

    monkeypatch.setattr(type(text), "_deepstack_process", record)
    with torch.no_grad():
        theirs = qwen3_vl(**picture, output_hidden_states=True)
        added = list(stream)
        got = hidden_states(qwen3_vl, range(5), **picture)
        last = text.norm(got[4])
    assert len(added) == 2
    visual = picture["input_ids"] == 45
    for layer in (1, 2):
        assert torch.equal(got[layer], added[layer - 1])
        # output hooks, which transformers uses here, see the block before the visual features come in
        assert torch.equal(got[layer][~visual], theirs.hidden_states[layer][~visual])
        assert bool((got[layer][visual] != theirs.hidden_states[layer][visual]).any(-1).all())
    for layer in (0, 3):
        assert torch.equal(got[layer], theirs.hidden_states[layer])
    torch.testing.assert_close(last, theirs.hidden_states[4], rtol=0, atol=1e-12)


def test_the_language_stack_is_found(qwen3_vl: Any, qwen3: Any, bert: Any) -> None:
    assert find_blocks(qwen3_vl) is qwen3_vl.model.language_model.layers
    assert find_blocks(qwen3) is qwen3.model.layers
    assert find_blocks(qwen3.model) is qwen3.model.layers
    assert find_blocks(bert) is bert.encoder.layer


def test_nothing_runs_beyond_the_deepest_layer(qwen3: Any) -> None:
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in [
            ("block 1", qwen3.model.layers[1]),
            ("block 2", qwen3.model.layers[2]),
            ("head", qwen3.lm_head),
        ]
    ]
    try:
        hidden_states(qwen3, [0, 2], input_ids=ids())
        assert ran == ["block 1"]
        ran.clear()
        hidden_states(qwen3, [4], input_ids=ids())
        assert ran == ["block 1", "block 2"]
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_are_removed_also_after_an_error(qwen3: Any) -> None:
    def hooks() -> list[int]:
        return [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in qwen3.model.layers]

    before = hooks()
    hidden_states(qwen3, [1, 4], input_ids=ids())
    assert hooks() == before
    with pytest.raises(TypeError):
        hidden_states(qwen3, [1, 4], input_ids="not a tensor")
    assert hooks() == before


def test_grad_mode_is_the_callers(qwen3: Any) -> None:
    model = copy.deepcopy(qwen3).requires_grad_(True)
    assert hidden_states(model, [2], input_ids=ids())[2].requires_grad
    with torch.no_grad():
        assert not hidden_states(model, [2], input_ids=ids())[2].requires_grad


class TupleBlock(nn.Module):
    def forward(self, *, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states + 1, None


class TupleModel(nn.Module):
    """Blocks as in older transformers: keyword inputs, tuples as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=2)
        self.layers = nn.ModuleList([TupleBlock(), TupleBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x, nothing = block(hidden_states=x)
            assert nothing is None
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


def test_models_without_blocks_are_named() -> None:
    with pytest.raises(LayerError, match="Linear has no configuration"):
        find_blocks(nn.Linear(2, 2))


def shift(h: Tensor) -> Tensor:
    """A change that differs from token to token."""
    return 0.5 * h + torch.arange(h.shape[1], dtype=h.dtype)[:, None] / 7


@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2"])
def test_the_blocks_above_go_on_from_the_edit(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    blocks, count = find_blocks(model), len(find_blocks(model))
    calls: list[tuple[Any, Any]] = []
    handles = [
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for block in blocks
    ]
    with torch.no_grad():
        clean = hidden_states(model, range(count + 1), input_ids=ids())
    for handle in handles:
        handle.remove()
    for layer in range(count + 1):
        expected = dict(clean)
        h = expected[layer] = shift(clean[layer])
        with torch.no_grad():
            for above in range(layer, count):
                (_, *rest), kwargs = calls[above]
                out = blocks[above](h, *rest, **kwargs)
                h = expected[above + 1] = out[0] if isinstance(out, tuple) else out
            # hooks run in the order in which they were set: reading inside sees what editing outside has made
            with edited(model, {layer: shift}):
                got = hidden_states(model, range(count + 1), input_ids=ids())
        for place in range(count + 1):
            torch.testing.assert_close(got[place], expected[place], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_logits_follow_the_edit_of_the_last_layer(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    count = len(find_blocks(model))
    norm = model.model.norm if name == "qwen3" else model.transformer.ln_f
    with torch.no_grad():
        clean = hidden_states(model, [count], input_ids=ids())[count]
        expected = model.lm_head(norm(shift(clean)))
        with edited(model, {count: shift}):
            got = model(input_ids=ids()).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_an_edit_that_changes_nothing(qwen3_vl: Any, picture: dict[str, Any]) -> None:
    with torch.no_grad():
        expected = qwen3_vl(**picture).logits
        with edited(qwen3_vl, {layer: lambda h: h for layer in range(5)}):
            assert torch.equal(qwen3_vl(**picture).logits, expected)


def test_edits_come_after_deepstack(qwen3_vl: Any, picture: dict[str, Any]) -> None:
    visual = picture["input_ids"] == 45
    seen: dict[int, Tensor] = {}

    def blank(layer: int) -> Any:
        def edit(h: Tensor) -> Tensor:
            seen[layer] = h
            return h.masked_fill(visual[..., None], 3.0)

        return edit

    with torch.no_grad():
        clean = hidden_states(qwen3_vl, [1, 2], **picture)
        for layer in (1, 2):
            with edited(qwen3_vl, {layer: blank(layer)}):
                after = hidden_states(qwen3_vl, [layer], **picture)[layer]
            assert torch.equal(seen[layer], clean[layer])
            # nothing is added to what the edit has put there
            assert bool((after[visual] == 3).all())
            assert torch.equal(after[~visual], clean[layer][~visual])


def test_edits_see_what_lower_ones_led_to(qwen3: Any) -> None:
    seen: list[Tensor] = []

    def record(h: Tensor) -> Tensor:
        seen.append(h)
        return 2 * h

    with torch.no_grad():
        with edited(qwen3, {1: shift}):
            expected = hidden_states(qwen3, [3], input_ids=ids())[3]
        # the order in which they are given does not matter
        with edited(qwen3, {3: record, 1: shift}):
            got = hidden_states(qwen3, [3], input_ids=ids())[3]
    assert torch.equal(seen[0], expected)
    assert torch.equal(got, 2 * expected)


def test_edits_keep_the_dtype_of_the_stream(qwen3: Any) -> None:
    with torch.no_grad(), edited(qwen3, {2: lambda h: h.float()}):
        got = hidden_states(qwen3, [2, 3], input_ids=ids())
    clean = hidden_states(qwen3, [2], input_ids=ids())[2]
    assert got[2].dtype == got[3].dtype == torch.float64
    assert torch.equal(got[2], clean.float().double())


def test_gradients_flow_through_an_edit(gpt2: Any) -> None:
    # (GPT-2, as Qwen's norms compute in float32)
    vector = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    with edited(gpt2, {2: lambda h: h + vector}):
        gpt2(ids()).logits.square().sum().backward()
    assert vector.grad is not None
    step = 1e-5 * torch.eye(16, dtype=torch.float64)[3]
    losses = []
    for sign in (1, -1):
        with torch.no_grad(), edited(gpt2, {2: lambda h, sign=sign: h + sign * step}):
            losses.append(float(gpt2(ids()).logits.square().sum()))
    assert float(vector.grad[3]) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_edits_are_gone_after_the_block_also_after_an_error(qwen3: Any) -> None:
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


def test_layers_by_number_or_name(qwen3_vl: Any, gpt2: Any) -> None:
    names = ["last", 0, "2", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "model.language_model.layers.0"]
    assert resolve_layers(qwen3_vl, names) == [0, 1, 2, 4]
    assert resolve_layers(gpt2, ["transformer.h.2", "embeddings"]) == [0, 3]
    with pytest.raises(LayerError, match=r"'model\.visual\.blocks\.0' names no layer of Qwen3VL"):
        resolve_layers(qwen3_vl, ["model.visual.blocks.0"])
    with pytest.raises(LayerError, match="layer 9 does not exist"):
        resolve_layers(qwen3_vl, ["9"])
