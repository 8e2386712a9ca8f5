"""Loss recovered against forwards edited by hand, in float64; heads of models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from sae import ConfigError
from sae.hooks import find_blocks
from sae.splice import loss_recovered

SPECIAL = (1, 2, 45, 47, 48)
IDS = torch.tensor([[1, 10, 11, 12, 13, 14, 2, 30, 31], [0, 0, 0, 1, 20, 21, 22, 23, 2]])
TEXT = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def figures(logits: Tensor, clean: Tensor, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Cross entropy and KL(clean ‖ logits) over the predictions that count, by the words of the documentation."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    counted = mask[:, :-1] & mask[:, 1:] & ~torch.isin(ids[:, 1:], torch.tensor(SPECIAL))
    p, q = (part[:, :-1][counted].log_softmax(-1) for part in (clean, logits))
    losses = -q.gather(1, ids[:, 1:][counted][:, None])
    return float(losses.mean()), float((p.exp() * (p - q)).sum(1).mean())


@pytest.mark.parametrize("name", ["gpt2", "qwen3_vl", "sink"])
def test_every_layer_against_a_forward_by_hand(name, request, picture, replaced, make_coder) -> None:
    """The vision-language model with an image; padding on the left; a sink."""
    model = copy.deepcopy(request.getfixturevalue("gpt2" if name == "sink" else name))
    inputs = picture if name == "qwen3_vl" else TEXT
    # tokens to replace: not padding, not special; visual ones are among them
    keep = inputs["attention_mask"].bool() & ~torch.isin(inputs["input_ids"], torch.tensor([1, 2, 47, 48]))
    layers = (0, 1, 2, len(find_blocks(model)))
    if name == "sink":
        model.transformer.wte.weight[12] *= 1000
        keep, layers = keep & (inputs["input_ids"] != 12), (1,)
    coders = {layer: make_coder(32 if name == "qwen3_vl" else 16, seed=layer) for layer in layers}

    def logits(makers: dict[int, Any]) -> Tensor:
        edits = {n: lambda h, make=make: torch.where(keep[..., None], make(h), h) for n, make in makers.items()}
        with replaced(model, edits), torch.no_grad():
            return model(**inputs, use_cache=False).logits

    given = {**inputs, "labels": inputs["input_ids"], "logits_to_keep": 1}  # both without effect
    factor = 10.0 if name == "sink" else None
    results = loss_recovered(model, coders, [given], special_ids=SPECIAL, sink_factor=factor)
    assert list(results) == [*coders, *(["all"] if len(coders) > 1 else [])]
    clean = logits({})
    for group, result in results.items():
        used = coders if group == "all" else {layer: coders[layer] for layer in coders if layer == group}
        runs = (clean, logits(used), logits(dict.fromkeys(used, torch.zeros_like)))
        (loss, _), (spliced, kl), (zero, kl_zero) = (figures(run, clean, inputs) for run in runs)
        assert len({round(value, 9) for value in (loss, spliced, zero)}) == 3
        got = [result.ce_clean, result.ce_spliced, result.ce_zero, result.kl, result.kl_zero]
        assert got == pytest.approx([loss, spliced, zero, kl, kl_zero], abs=1e-9)
        assert result.recovered == pytest.approx((zero - spliced) / (zero - loss), rel=1e-6)
        assert result.replaced == int(keep.sum())


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_logits_that_are_capped_or_scaled(make_coder: Any) -> None:
    for name, changes in (("Gemma2", {"final_logit_softcapping": 0.7}), ("Granite", {"logits_scaling": 4})):
        config = getattr(transformers, f"{name}Config")(**SIZES, initializer_range=0.5, **changes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval().requires_grad_(False)
        result = loss_recovered(model, {1: make_coder(16)}, [{"input_ids": IDS[:1]}])[1]
        logits = model(IDS[:1]).logits[0, :-1]
        assert result.ce_clean == pytest.approx(float(F.cross_entropy(logits, IDS[0, 1:])), abs=1e-9)


def test_what_cannot_be_spliced(gpt2: Any, bert: Any, make_coder: Any) -> None:
    odd = copy.deepcopy(gpt2)
    odd.lm_head = torch.nn.Sequential(odd.lm_head, torch.nn.Linear(50, 50).double())
    odd.get_output_embeddings = lambda: odd.lm_head[0]
    for model, message in ((odd, "does something to its logits"), (bert, "BertModel has no language-model head")):
        with pytest.raises(ConfigError, match=message):
            loss_recovered(model, {1: make_coder(16)}, [TEXT])
