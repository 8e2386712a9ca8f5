"""Loss recovered against forwards edited by hand, in float64, and against cases with known answers; heads of models."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import ActivationError, ConfigError, LayerError, ShapeError, TopKSAE
from sae.hooks import find_blocks
from sae.splice import LossRecovered, loss_recovered

SPECIAL = (1, 2, 45, 47, 48)
WIDTH = {"gpt2": 16, "qwen3": 16, "qwen3_vl": 32}


def text_batch(left: bool = False) -> dict[str, Tensor]:
    padding = [0] * 3
    short = [1, 20, 21, 22, 23, 2]
    ids = torch.tensor([[1, 10, 11, 12, 13, 14, 2, 30, 31], [*padding, *short] if left else [*short, *padding]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture(params=["gpt2", "qwen3", "qwen3_vl"])
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Tensor], int]:
    """Model, inputs and width; the vision-language model with an image."""
    inputs = request.getfixturevalue("picture") if request.param == "qwen3_vl" else text_batch()
    return request.getfixturevalue(request.param), inputs, WIDTH[request.param]


def coder_of(d: int, seed: int, d_sae: int = 48, k: int = 4) -> TopKSAE:
    coder = TopKSAE(d, d_sae, k, generator=torch.Generator().manual_seed(seed)).double().requires_grad_(False)
    coder.b_dec.copy_(torch.randn(d, generator=torch.Generator().manual_seed(seed + 1)))
    return coder


def figures(logits: Tensor, clean: Tensor, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Cross entropy and KL(clean ‖ logits) over the predictions that count, by the words of the documentation."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    counted = mask[:, :-1] & mask[:, 1:] & ~torch.isin(ids[:, 1:], torch.tensor(SPECIAL))
    p, q = (part[:, :-1][counted].log_softmax(-1) for part in (clean, logits))
    losses = -q.gather(1, ids[:, 1:][counted][:, None])
    return float(losses.mean()), float((p.exp() * (p - q)).sum(1).mean())


def kept(inputs: dict[str, Tensor]) -> Tensor:
    """Tokens to replace: not padding, not special; visual ones are among them."""
    special = torch.tensor([token for token in SPECIAL if token != 45])
    return inputs["attention_mask"].bool() & ~torch.isin(inputs["input_ids"], special)


@pytest.fixture
def assert_losses(replaced: Any) -> Any:
    """assert_losses(result, model, inputs, keep, coders): against forwards with the kept tokens replaced by hand."""

    def check(result: LossRecovered, model: Any, inputs: Any, keep: Tensor, coders: dict[int, TopKSAE]) -> None:
        def logits(makers: dict[int, Any]) -> Tensor:
            edits = {n: lambda h, make=make: torch.where(keep[..., None], make(h), h) for n, make in makers.items()}
            with replaced(model, edits), torch.no_grad():
                return model(**inputs, use_cache=False).logits

        clean = logits({})
        runs = (clean, logits(coders), logits(dict.fromkeys(coders, torch.zeros_like)))
        (loss, _), (spliced, kl), (zero, kl_zero) = (figures(run, clean, inputs) for run in runs)
        assert len({round(value, 9) for value in (loss, spliced, zero)}) == 3
        got = [result.ce_clean, result.ce_spliced, result.ce_zero, result.kl, result.kl_zero]
        assert got == pytest.approx([loss, spliced, zero, kl, kl_zero], abs=1e-9)
        assert result.recovered == pytest.approx((zero - spliced) / (zero - loss), rel=1e-6)
        assert result.replaced == int(keep.sum())

    return check


def test_every_layer_against_a_forward_by_hand(case: tuple[Any, dict[str, Tensor], int], assert_losses: Any) -> None:
    model, inputs, d = case
    coders = {layer: coder_of(d, layer) for layer in (0, 1, 2, len(find_blocks(model)))}
    results = loss_recovered(model, coders, [inputs], special_ids=SPECIAL, sink_factor=None)
    assert list(results) == [*coders, "all"]
    for name, result in results.items():
        spliced = coders if name == "all" else {layer: coders[layer] for layer in (name,) if isinstance(layer, int)}
        assert_losses(result, model, inputs, kept(inputs), spliced)


def test_exact_coders_recover_everything_and_zeros_nothing(case: tuple[Any, dict[str, Tensor], int]) -> None:
    model, inputs, d = case
    exact, nothing = TopKSAE(d, 2 * d, 2 * d).double().requires_grad_(False), coder_of(d, 0)
    # ReLU(h) - ReLU(-h) = h
    exact.W_dec.copy_(torch.cat([torch.eye(d), -torch.eye(d)]))
    exact.W_enc.copy_(exact.W_dec.t())
    nothing.W_dec.zero_()
    nothing.b_dec.zero_()
    for coder, recovered in ((exact, 1), (nothing, 0)):
        for result in loss_recovered(model, {1: coder, 2: coder}, [inputs], special_ids=SPECIAL).values():
            assert result.recovered == recovered
            assert result.kl == (1 - recovered) * result.kl_zero
            assert result.kl_zero > 0
            assert result.ce_zero != result.ce_clean


def test_sinks_are_left_as_they_are(qwen3: Any, assert_losses: Any) -> None:
    model, inputs = copy.deepcopy(qwen3), text_batch()
    model.model.embed_tokens.weight[12] *= 1000
    coders = {1: coder_of(16, 3)}
    [result] = loss_recovered(model, coders, [inputs], special_ids=SPECIAL, sink_factor=10.0).values()
    keep = kept(inputs) & (inputs["input_ids"] != 12)
    assert int(keep.sum()) == int(kept(inputs).sum()) - 1
    assert_losses(result, model, inputs, keep, coders)


def test_padding_on_the_left(qwen3: Any, assert_losses: Any) -> None:
    inputs, coders = text_batch(left=True), {1: coder_of(16, 3)}
    [result] = loss_recovered(qwen3, coders, [inputs], special_ids=SPECIAL, sink_factor=None).values()
    assert_losses(result, qwen3, inputs, kept(inputs), coders)
    # the first token of a row, predicted from padding, does not count even where it is no special token
    [bare] = loss_recovered(qwen3, coders, [inputs], special_ids=(2,), sink_factor=None).values()
    assert bare.tokens == result.tokens == 11


def test_all_arguments_reach_the_model(qwen3_vl: Any, picture: dict[str, Tensor], assert_losses: Any) -> None:
    names = ("image_grid_thw", "attention_mask", "mm_token_type_ids")
    positions, _ = qwen3_vl.model.get_rope_index(picture["input_ids"], **{name: picture[name] for name in names})
    odd = {**picture, "position_ids": 2 * positions}
    coders = {2: coder_of(32, 5)}
    [result] = loss_recovered(qwen3_vl, coders, [odd], special_ids=SPECIAL).values()
    assert_losses(result, qwen3_vl, odd, kept(odd), coders)
    [usual] = loss_recovered(qwen3_vl, coders, [picture], special_ids=SPECIAL).values()
    assert abs(usual.ce_clean - result.ce_clean) > 1e-6
    labelled = {**picture, "labels": picture["input_ids"], "logits_to_keep": 1}
    [same] = loss_recovered(qwen3_vl, coders, [labelled], special_ids=SPECIAL).values()
    assert torch.equal(same.sums(), usual.sums())


def test_batches_and_processes_pool(gpt2: Any) -> None:
    first, second = text_batch(), {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    coders = {1: coder_of(16, 1), 2: coder_of(16, 2)}

    def run(*batches: Any) -> dict[int | str, LossRecovered]:
        return loss_recovered(gpt2, coders, batches, special_ids=SPECIAL, sink_factor=None)

    whole, left, right = run(first, second), run(first), run(second)
    for name, expected in whole.items():
        loaded = LossRecovered()
        loaded.load_sums(left[name].sums() + right[name].sums())
        torch.testing.assert_close(loaded.sums(), expected.sums(), rtol=1e-12, atol=0)
        assert loaded.recovered == pytest.approx(expected.recovered, rel=1e-9)
    # pooled by token, not by batch
    n, m = left[1], right[1]
    assert whole[1].ce_spliced == pytest.approx((n.tokens * n.ce_spliced + 3 * m.ce_spliced) / (n.tokens + 3))


def test_peft_models_are_spliced_too(qwen3: Any) -> None:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    wrapped = peft.get_peft_model(copy.deepcopy(qwen3), config).eval()
    [expected], [result] = (loss_recovered(m, {1: coder_of(16, 1)}, [text_batch()]).values() for m in (qwen3, wrapped))
    torch.testing.assert_close(result.sums(), expected.sums())


def test_inputs_that_cannot_be_used(qwen3: Any) -> None:
    coders, batch, lone = {1: coder_of(16, 1)}, text_batch(), {"input_ids": torch.tensor([[5]])}
    broken, endless, worse = copy.deepcopy(qwen3), coder_of(16, 1), coder_of(16, 1)
    broken.model.layers[0].mlp.down_proj.weight.fill_(math.inf)
    endless.W_dec.fill_(math.inf)
    worse.b_dec.fill_(math.inf)
    for model, used, batches, error, message in (
        (qwen3, {}, [batch], ConfigError, "no coder"),
        (qwen3, {9: coders[1]}, [batch], LayerError, "layer 9"),
        (
            qwen3,
            coders,
            [{**batch, "attention_mask": torch.ones(2, 1, 9, 9)}],
            ShapeError,
            "batch 0: .* attention_mask",
        ),
        (qwen3, coders, [lone], ActivationError, "nothing to predict"),
        (broken, coders, [batch], ActivationError, "batch 0: hidden states of layer 1 are not finite"),
        (qwen3, {1: endless}, [lone, batch], ActivationError, "batch 1: the loss with layer 1 replaced is not finite"),
        (qwen3, {1: worse}, [batch], ActivationError, "batch 0, layer 1: "),
    ):
        with pytest.raises(error, match=message):
            loss_recovered(model, used, batches)
    [empty] = loss_recovered(qwen3, coders, [], allow_empty=True).values()
    summary = json.loads(json.dumps(empty.summary(), allow_nan=False))
    assert summary["tokens"] == 0
    assert summary["recovered"] is summary["kl"] is None


IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))


def clean_loss(logits: Tensor) -> float:
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), IDS[:, 1:].flatten()))


def spliced(model: Any) -> LossRecovered:
    coder = TopKSAE(16, 48, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(False)
    return loss_recovered(model, {1: coder}, [{"input_ids": IDS}], sink_factor=None)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_made_in_chunks_and_at_least_float32(qwen3, dtype, monkeypatch) -> None:
    model = copy.deepcopy(qwen3).to(dtype)
    positions: list[int] = []
    states: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, output: positions.append(output.shape[1]))
    model.model.norm.register_forward_hook(lambda _, __, output: states.append(output))
    whole = spliced(model)
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
    torch.testing.assert_close(spliced(model).sums(), whole.sums(), rtol=1e-6, atol=1e-9)
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
        assert spliced(model).ce_clean == pytest.approx(clean_loss(model(IDS).logits), abs=tolerance)


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
    result, logits = spliced(model), model(IDS).logits
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
        spliced(odd)


def test_models_that_do_not_predict_the_next_token(bert: Any, qwen3: Any) -> None:
    from transformers import BertForMaskedLM

    for model, message in (
        (bert, "BertModel has no language-model head"),
        (qwen3.model, "has no language-model head"),
        (BertForMaskedLM(bert.config).eval(), "does not predict the next token"),
        (copy.deepcopy(qwen3).train(), "training mode"),
    ):
        with pytest.raises(ConfigError, match=message):
            spliced(model)
