"""Edits by hand in float64, run through the rest of the model by other means than hooks; generation with a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ConfigError, LayerError, ShapeError
from sae.hooks import hidden_states
from sae.probe.steering import ablate, steer

NAMES = ["gpt2", "qwen3", "qwen3_vl"]
WIDTH = {"gpt2": 16, "qwen3": 16, "qwen3_vl": 32}


Strengths = dict[int, float]


@pytest.fixture(scope="module")
def by_hand(dense: Any) -> Any:
    """by_hand(coder, strengths, mode, mask): the formula, feature by feature."""

    def make(coder: Any, wanted: Strengths, mode: str, mask: Callable[[Tensor], Tensor] | None = None) -> Any:
        def edit(h: Tensor) -> Tensor:
            z = dense(coder, h)
            change = torch.zeros_like(h)
            for feature, strength in wanted.items():
                direction = coder.W_dec[feature]
                if mode == "add":
                    change += strength * direction
                elif mode == "relative":
                    change += strength * h.norm(dim=-1, keepdim=True) * direction / direction.norm()
                else:
                    change += (strength - z[..., feature, None]) * direction
            if mask is not None:
                change *= mask(torch.arange(h.shape[1]))[:, None]
            return h + change

        return edit

    return make


def inputs_of(name: str, picture: dict[str, Any]) -> dict[str, Any]:
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(5))
    return dict(picture) if name == "qwen3_vl" else {"input_ids": ids}


def busiest(z: Tensor, count: int) -> list[int]:
    """Features of dense codes z that are active on some tokens and not on others."""
    active = (z > 0).flatten(0, 1).sum(0)
    return [int(f) for f in active.argsort(descending=True) if 0 < active[f] < z.shape[0] * z.shape[1]][:count]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["add", "relative", "set", "ablate"])
def test_forwards_equal_the_formula(name, mode, request, picture, make_coder, by_hand, dense) -> None:
    model, inputs = request.getfixturevalue(name), inputs_of(name, picture)
    replaced = request.getfixturevalue("replaced")
    coders = {layer: make_coder(WIDTH[name], seed=layer) for layer in (0, 1, 2)}
    with torch.no_grad():
        states, plain = hidden_states(model, [1, 2], **inputs), model(**inputs).logits
    strengths = (0.0, 0.0, 0.0) if mode == "ablate" else (1.5, -0.5, 4.0)
    wanted = {n: dict(zip(busiest(dense(coders[n], states[n]), 3), strengths, strict=True)) for n in (1, 2)}
    with torch.no_grad(), replaced(model, {layer: by_hand(coders[layer], wanted[layer], mode) for layer in (1, 2)}):
        expected = model(**inputs).logits
    options: dict[str, Any] = {"mode": "add", "relative": True} if mode == "relative" else {"mode": mode}
    with torch.no_grad(), steer(model, coders, wanted, **options):
        got = model(**inputs).logits
        inside = hidden_states(model, [1], **inputs)[1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert float((got - plain).abs().max()) > 1e-3
    torch.testing.assert_close(inside, by_hand(coders[1], wanted[1], mode)(states[1]), rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain)
        if mode == "ablate":
            with ablate(model, coders, {layer: list(row) for layer, row in wanted.items()}):
                assert torch.equal(model(**inputs).logits, got)


def test_ablation_leaves_other_tokens_bit_identical(gpt2: Any, make_coder: Any, picture: Any, dense: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = copy.deepcopy(gpt2).to(dtype)
        coder, inputs = make_coder(16).float(), inputs_of("gpt2", picture)
        with torch.no_grad():
            h = hidden_states(model, [1], **inputs)[1]
            [feature] = busiest(dense(coder, h.float()), 1)
            active = coder.encode(h).dense(48)[..., feature] > 0
            with ablate(model, {1: coder}, {1: [feature]}):
                got = hidden_states(model, [1], **inputs)[1]
        assert got.dtype == dtype
        assert 0 < int(active.sum()) < active.numel()
        assert torch.equal(got[~active], h[~active])
        assert bool((got[active] != h[active]).any(-1).all())


def greedy(model: Any, inputs: dict[str, Any], steps: int) -> Tensor:
    """Greedy decoding with whole forwards, no cache."""
    inputs = dict(inputs)
    for _ in range(steps):
        logits = model(**inputs, use_cache=False).logits[:, -1]
        # ends and placeholders without a picture (refused by the model) are ruled out in generate too
        logits[:, [2, 45, 46]] = -torch.inf
        step = logits.argmax(-1, keepdim=True)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], step], 1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(step).int()], 1)
    return inputs["input_ids"]


@pytest.mark.parametrize(("name", "mode"), [("qwen3", "add"), ("qwen3_vl", "set")])
@pytest.mark.parametrize("positions", ["all", "prompt", "generated"])
def test_generation_with_a_cache(name, mode, positions, request, picture, make_coder, by_hand) -> None:
    model, replaced = request.getfixturevalue(name), request.getfixturevalue("replaced")
    inputs = inputs_of(name, picture)
    inputs = {key: value[:1] if key in ("input_ids", "mm_token_type_ids") else value for key, value in inputs.items()}
    inputs.pop("attention_mask", None)
    length, steps = inputs["input_ids"].shape[1], 8
    coders = {1: make_coder(WIDTH[name]), 2: make_coder(WIDTH[name], seed=3)}
    wanted = {1: {4: 0.9, 30: -2.0}, 2: {7: 1.4}}
    mask = {"all": None, "prompt": lambda at: at < length, "generated": lambda at: at >= length}[positions]
    outputs = []
    for where in (mask, lambda at: at < 0, None):
        edits = {layer: by_hand(coders[layer], wanted[layer], mode, where) for layer in (1, 2)}
        with torch.no_grad(), replaced(model, edits):
            outputs.append(greedy(model, inputs, steps))
    expected, *others = outputs
    options: dict[str, Any] = {"max_new_tokens": steps, "min_new_tokens": steps, "suppress_tokens": [45, 46]}
    options["do_sample"] = False
    with steer(model, coders, wanted, mode, positions=mask):
        for use_cache in (True, True, False):
            assert torch.equal(model.generate(**inputs, **options, use_cache=use_cache), expected)
    # the positions matter here
    assert any(not torch.equal(other, expected) for other in others)


def test_positions_chosen_by_a_callable(gpt2: Any, make_coder: Any) -> None:
    coder, ids = make_coder(16), torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    with torch.no_grad():
        h = hidden_states(gpt2, [1], input_ids=ids)[1]
        for chosen in (torch.tensor([False, True, False, True, True]), torch.rand(2, 5) < 0.5):
            with steer(gpt2, {1: coder}, {1: {3: 2.0}}, positions=lambda at, chosen=chosen: chosen[..., at]):
                got = hidden_states(gpt2, [1], input_ids=ids)[1]
            mask = chosen.expand(2, 5)
            assert torch.equal(got[~mask], h[~mask])
            torch.testing.assert_close(got[mask], h[mask] + 2 * coder.W_dec[3], rtol=0, atol=1e-12)
        for wrong in (lambda at: at, lambda at: torch.ones(3, dtype=torch.bool)):
            with steer(gpt2, {1: coder}, {1: {3: 2.0}}, positions=wrong), pytest.raises(ShapeError, match="be bool"):
                gpt2(ids)


def hooks_on(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("features", "options", "error", "message"),
    [
        ({2: {1: 1.0}}, {}, LayerError, r"layer 2 has no coder; there are coders of \[1, 3, 9\]"),
        ({9: {1: 1.0}}, {}, LayerError, "layer 9 does not exist"),
        ({3: {1: 1.0}}, {}, ShapeError, "hidden states of 8, the model has 16"),
        ({1: {48: 1.0}}, {}, ConfigError, "layer 1: feature 48 does not exist; there are 0 to 47"),
        ({1: {"cat": 1.0}}, {}, ConfigError, "feature 'cat' does not exist"),
        ({1: [3]}, {"mode": "set"}, ConfigError, "needs a strength"),
        ({1: {3: float("nan")}}, {}, ConfigError, "strength nan is not a finite number"),
        ({1: {3: "much"}}, {}, ConfigError, "strength 'much' is not a finite number"),
        ({1: {3: 1.0}}, {"mode": "scale"}, ConfigError, "mode 'scale'"),
        ({1: {3: 1.0}}, {"mode": "set", "relative": True}, ConfigError, "relative strengths go with mode 'add'"),
    ],
)
def test_mistakes_are_reported_before_the_forward(gpt2, make_coder, features, options, error, message) -> None:
    coders = {1: make_coder(16), 3: make_coder(8), 9: make_coder(16)}
    before = hooks_on(gpt2)
    with pytest.raises(error, match=message) as caught, steer(gpt2, coders, features, **options):
        pytest.fail("entered the block")
    assert "\n" not in str(caught.value)
    assert hooks_on(gpt2) == before
