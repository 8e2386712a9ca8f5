"""Groups and schedule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from remind.alignment.config import LoraConfig
from remind.alignment.model import check_head, fingerprint, trainable
from remind.alignment.optim import adamw, learning_rate
from remind.core.errors import ModelError


def test_norms_and_embeddings_do_not_decay(make_model: Callable[..., Any]) -> None:
    model = trainable(make_model(), None)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in g["params"]} for g in adamw(model, 1e-3, 0.1).param_groups)
    assert all("norm" in name or "embed" in name for name in spared)
    assert not any("norm" in name or "embed" in name for name in decayed)
    assert "lm_head.weight" in decayed
    # the vision tower is in neither
    assert decayed | spared == {name for name in names.values() if "visual" not in name}


def test_a_tied_head_does_not_decay(make_model: Callable[..., Any]) -> None:
    model: Any = trainable(make_model(tie=True), None)
    spared = adamw(model, 1e-3, 0.1).param_groups[1]["params"]
    assert any(p is model.lm_head.weight for p in spared)


def test_adapters_go_on_the_language_model_alone(make_model: Callable[..., Any]) -> None:
    model = trainable(make_model(), LoraConfig(r=2, alpha=4, target_modules=("q_proj", "down_proj")))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("language_model" in name and "lora_" in name for name in trained)
    with pytest.raises(ModelError, match="no layer 'qkv'"):
        trainable(make_model(), LoraConfig(target_modules=("q_proj", "qkv")))


def test_the_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.1, "cosine") for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert {learning_rate(step, 100, 2.0, 0.0, "constant") for step in range(100)} == {2.0}
    assert learning_rate(0, 1, 2.0, 1.0, "cosine") == 2.0


def test_the_fingerprint_tells_models_apart(make_model: Callable[..., Any]) -> None:
    assert fingerprint(make_model(0)) == fingerprint(make_model(0))
    assert fingerprint(make_model(0)) != fingerprint(make_model(1))


def test_a_head_that_does_more_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model()
    check_head(model)
    model.lm_head.register_forward_hook(lambda _, __, logits: torch.tanh(logits / 30) * 30)
    with pytest.raises(ModelError, match="more to its logits"):
        check_head(model)


def test_dropout_is_off(make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.model.language_model.layers[0].self_attn.attention_dropout = 0.3
    model.model.extra = torch.nn.Dropout(0.5)
    trainable(model, None)
    assert model.model.language_model.layers[0].self_attn.attention_dropout == 0.0
    assert model.model.extra.p == 0.0
    assert model.training
