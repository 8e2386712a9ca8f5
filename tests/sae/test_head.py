"""Logits made from what the head is given, against the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import TopKSAE
from sae.errors import ConfigError
from sae.splice import LossRecovered, loss_recovered

IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))


def clean_loss(logits: Tensor) -> float:
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), IDS[:, 1:].flatten()))


def run(model: Any) -> LossRecovered:
    coder = TopKSAE(16, 48, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(False)
    return loss_recovered(model, {1: coder}, [{"input_ids": IDS}], sink_factor=None)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_made_in_chunks_and_at_least_float32(
    qwen3: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(qwen3).to(dtype)
    positions: list[int] = []
    states: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, output: positions.append(output.shape[1]))
    model.model.norm.register_forward_hook(lambda _, __, output: states.append(output))
    whole = run(model)
    # the module itself never makes logits of more than one position
    assert positions == [1, 1, 1]
    assert whole.ce_clean == pytest.approx(clean_loss(states[0].double() @ model.lm_head.weight.double().t()), abs=1e-6)
    rows: list[int] = []
    original = F.log_softmax

    def record(logits: Tensor, dim: int) -> Tensor:
        rows.append(len(logits))
        assert logits.dtype == torch.promote_types(dtype, torch.float32)
        return original(logits, dim=dim)

    monkeypatch.setattr("sae.splice._CHUNK", 150)
    monkeypatch.setattr("sae.splice.F.log_softmax", record)
    torch.testing.assert_close(run(model).sums(), whole.sums(), rtol=1e-6, atol=1e-9)
    assert (max(rows), sum(rows)) == (3, 3 * 2 * 8)


@pytest.mark.parametrize("kind", [nn.Linear, type("Special", (nn.Linear,), {})])
def test_heads_with_a_bias_and_of_other_kinds(qwen3: Any, kind: Any) -> None:
    model = copy.deepcopy(qwen3)
    torch.manual_seed(0)
    model.lm_head = kind(16, 50, bias=True).requires_grad_(False)
    model = model.double()
    model.lm_head.bias.copy_(torch.randn(50))
    for dtype in (torch.float64, torch.bfloat16):
        model = model.to(dtype)
        tolerance = 1e-9 if dtype == torch.float64 else 0.02
        assert run(model).ce_clean == pytest.approx(clean_loss(model(IDS).logits), abs=tolerance)


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("name", "changes", "factor"),
    [
        ("Gemma2", {"final_logit_softcapping": 0.7}, 0.5),
        ("Cohere", {"logit_scale": 0.3}, 0.3),
        ("Granite", {"logits_scaling": 4}, 0.25),
    ],
)
def test_logits_that_are_capped_or_scaled(name: str, changes: dict[str, float], factor: float) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, initializer_range=0.5, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval().requires_grad_(False)
    result, logits = run(model), model(IDS).logits
    assert result.ce_clean == pytest.approx(clean_loss(logits), abs=1e-9)
    # the scale matters: what the head alone gives is something else
    assert abs(clean_loss(logits / factor) - result.ce_clean) > 1e-3


def test_logits_changed_in_an_unknown_way_are_refused(qwen3: Any) -> None:
    from transformers import Qwen3ForCausalLM

    class Odd(Qwen3ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    odd = copy.deepcopy(qwen3)
    odd.__class__ = Odd
    with pytest.raises(ConfigError, match="Odd does something to its logits"):
        run(odd)


def test_models_that_do_not_predict_the_next_token(bert: Any, qwen3: Any) -> None:
    from transformers import BertForMaskedLM

    for model, message in (
        (bert, "BertModel has no language-model head"),
        (qwen3.model, "has no language-model head"),
        (BertForMaskedLM(bert.config).eval(), "does not predict the next token"),
        (copy.deepcopy(qwen3).train(), "training mode"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(model)
