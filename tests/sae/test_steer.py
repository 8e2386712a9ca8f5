"""Edits by hand in float64, run through the rest of the model by other means than hooks; generation with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ConfigError, ShapeError
from sae.hooks import hidden_states
from sae.probe.steering import ablate, steer

IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def by_hand(dense: Any) -> Any:
    """by_hand(coder, strengths, mode, mask): the formula, feature by feature."""

    def make(
        coder: Any, wanted: dict[int, float], mode: str, mask: Callable[[Tensor], Tensor] = torch.ones_like
    ) -> Any:
        def edit(h: Tensor) -> Tensor:
            z, change = dense(coder, h), torch.zeros_like(h)
            for feature, strength in wanted.items():
                direction = coder.W_dec[feature]
                if mode == "add":
                    change += strength * direction
                elif mode == "relative":
                    change += strength * h.norm(dim=-1, keepdim=True) * direction / direction.norm()
                else:
                    change += (strength - z[..., feature, None]) * direction
            return h + change * mask(torch.arange(h.shape[1]))[:, None]

        return edit

    return make


@pytest.mark.parametrize("mode", ["add", "relative", "set", "ablate"])
def test_forwards_equal_the_formula(mode, gpt2, qwen3_vl, picture, make_coder, by_hand, dense, replaced) -> None:
    model, inputs, width = (qwen3_vl, picture, 32) if mode == "ablate" else (gpt2, {"input_ids": IDS}, 16)
    coders = {layer: make_coder(width, seed=layer) for layer in (0, 1, 2)}
    states, plain = hidden_states(model, [1, 2], **inputs), model(**inputs).logits
    wanted = {}
    for layer in (1, 2):
        # features that are active on some tokens and not on others
        share = (dense(coders[layer], states[layer]) > 0).double().mean((0, 1))
        features = [int(f) for f in share.argsort(descending=True) if 0 < share[f] < 1][:3]
        wanted[layer] = dict(zip(features, (0.0, 0.0, 0.0) if mode == "ablate" else (1.5, -0.5, 4.0), strict=True))
    with torch.no_grad(), replaced(model, {layer: by_hand(coders[layer], wanted[layer], mode) for layer in (1, 2)}):
        expected = model(**inputs).logits
    options: dict[str, Any] = {"mode": "add", "relative": True} if mode == "relative" else {"mode": mode}
    with torch.no_grad(), steer(model, coders, wanted, **options):
        got, inside = model(**inputs).logits, hidden_states(model, [1], **inputs)[1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert float((got - plain).abs().max()) > 1e-3
    torch.testing.assert_close(inside, by_hand(coders[1], wanted[1], mode)(states[1]), rtol=0, atol=1e-12)
    assert torch.equal(model(**inputs).logits, plain)
    if mode == "ablate":
        # where none of the features is active, h stays bit for bit
        active = (dense(coders[1], states[1])[..., list(wanted[1])] > 0).any(-1)
        assert torch.equal(inside[~active], states[1][~active])
        with ablate(model, coders, wanted):
            assert torch.equal(model(**inputs).logits, got)


def test_mistakes_are_reported_before_the_forward(gpt2, make_coder) -> None:
    coders = {1: make_coder(16)}
    with pytest.raises(ConfigError, match="feature 48 does not exist"), steer(gpt2, coders, {1: {48: 1.0}}):
        pytest.fail("entered the block")
    with steer(gpt2, coders, {1: {3: 2.0}}, positions=lambda at: at), pytest.raises(ShapeError, match="be bool"):
        gpt2(IDS)
