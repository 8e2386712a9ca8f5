"""Captured layers against transformers' own hidden states, and against a capture of what DeepStack returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sae import LayerError
from sae.hooks import find_blocks, hidden_states, n_layers


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
        count = n_layers(model)
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


def test_peft_models_are_hooked_too(qwen3: Any) -> None:
    peft = pytest.importorskip("peft")
    import copy

    wrapped = peft.get_peft_model(copy.deepcopy(qwen3), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with torch.no_grad():
        got = hidden_states(wrapped, [3], input_ids=ids())
        assert torch.equal(got[3], hidden_states(qwen3, [3], input_ids=ids())[3])


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
    import copy

    model = copy.deepcopy(qwen3).requires_grad_(True)
    assert hidden_states(model, [2], input_ids=ids())[2].requires_grad
    with torch.no_grad():
        assert not hidden_states(model, [2], input_ids=ids())[2].requires_grad


class TupleBlock(nn.Module):
    def forward(self, *, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states + 1, None


def test_tuples_and_keyword_inputs() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from types import SimpleNamespace

            self.config = SimpleNamespace(num_hidden_layers=2)
            self.layers = nn.ModuleList([TupleBlock(), TupleBlock()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.layers:
                x = block(hidden_states=x)[0]
            return x

    got = hidden_states(Old(), [0, 1, 2], x=torch.zeros(1, 2, 3))
    assert [float(got[layer].mean()) for layer in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("layers", [[5], [-1], [0, 9], [], [True]])
def test_layers_out_of_range(qwen3: Any, layers: list[int]) -> None:
    with pytest.raises(LayerError, match=r"layers 0 \(embeddings\) to 4") as caught:
        hidden_states(qwen3, layers, input_ids=ids())
    assert "\n" not in str(caught.value)


def test_models_without_blocks_are_named() -> None:
    with pytest.raises(LayerError, match="Linear has no configuration"):
        find_blocks(nn.Linear(2, 2))
