"""Loss recovered against a forward written out block by block, in float64, and against cases with known answers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import ActivationError, ConfigError, LayerError, ShapeError, TopKSAE
from sae.splice import LossRecovered, loss_recovered

Edit = Callable[[Tensor], Tensor]
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


class ByHand:
    """A model's blocks, run one after the other in a loop of our own."""

    def __init__(self, model: Any, inputs: dict[str, Tensor]) -> None:
        text = model.transformer if hasattr(model, "transformer") else model.model
        text = getattr(text, "language_model", text)
        self.blocks = text.h if hasattr(text, "h") else text.layers
        self.norm = text.ln_f if hasattr(text, "ln_f") else text.norm
        self.head, self.inputs = model.lm_head, inputs
        self.calls: list[tuple[Any, Any]] = []
        self.deepstack: list[tuple[Tensor, Tensor]] = []

        def called(_: Any, args: Any, kwargs: Any) -> None:
            self.calls.append((args, kwargs))

        def added(state: Tensor, mask: Tensor, visual: Tensor) -> Tensor:
            self.deepstack.append((mask, visual))
            return original(state, mask, visual)

        handles = [block.register_forward_pre_hook(called, with_kwargs=True) for block in self.blocks]
        with pytest.MonkeyPatch.context() as patch:
            if hasattr(text, "_deepstack_process"):
                original = text._deepstack_process
                patch.setattr(text, "_deepstack_process", added)
            with torch.no_grad():
                self.own_logits = model(**inputs, use_cache=False).logits
        for handle in handles:
            handle.remove()

    @torch.no_grad()
    def __call__(self, edits: dict[int, Edit]) -> tuple[dict[int, Tensor], Tensor]:
        """The stream at every layer, after the edit, and the logits."""
        (h, *_), _ = self.calls[0]
        streams = {}
        for layer, block in enumerate(self.blocks):
            h = streams[layer] = edits.get(layer, lambda h: h)(h)
            (_, *rest), kwargs = self.calls[layer]
            h = block(h, *rest, **kwargs)
            h = h[0] if isinstance(h, tuple) else h
            if layer < len(self.deepstack):
                mask, visual = self.deepstack[layer]
                h = h.clone()
                h[mask] = h[mask] + visual
        h = streams[len(self.blocks)] = edits.get(len(self.blocks), lambda h: h)(h)
        return streams, self.head(self.norm(h))


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


def at(keep: Tensor, make: Edit) -> Edit:
    return lambda h: torch.where(keep[..., None], make(h), h)


def assert_losses(result: LossRecovered, by_hand: ByHand, keep: Tensor, coders: dict[int, TopKSAE]) -> None:
    """The figures of these coders spliced together, from the forward by hand with the kept tokens replaced."""
    inputs, clean = by_hand.inputs, by_hand({})[1]
    torch.testing.assert_close(clean, by_hand.own_logits, rtol=0, atol=1e-12)
    spliced = by_hand({layer: at(keep, coder) for layer, coder in coders.items()})[1]
    zero = by_hand({layer: at(keep, torch.zeros_like) for layer in coders})[1]
    (loss, _), (loss_spliced, kl), (loss_zero, kl_zero) = (figures(x, clean, inputs) for x in (clean, spliced, zero))
    assert len({round(value, 9) for value in (loss, loss_spliced, loss_zero)}) == 3
    expected = [loss, loss_spliced, loss_zero, kl, kl_zero]
    got = [result.ce_clean, result.ce_spliced, result.ce_zero, result.kl, result.kl_zero]
    assert got == pytest.approx(expected, abs=1e-9)
    assert result.recovered == pytest.approx((loss_zero - loss_spliced) / (loss_zero - loss), rel=1e-6)
    assert result.replaced == int(keep.sum())


def test_every_layer_against_a_forward_by_hand(case: tuple[Any, dict[str, Tensor], int]) -> None:
    model, inputs, d = case
    by_hand = ByHand(model, inputs)
    coders = {layer: coder_of(d, layer) for layer in (0, 1, 2, len(by_hand.blocks))}
    results = loss_recovered(model, coders, [inputs], special_ids=SPECIAL, sink_factor=None)
    assert list(results) == [*coders, "all"]
    for name, result in results.items():
        spliced = coders if name == "all" else {layer: coders[layer] for layer in (name,) if isinstance(layer, int)}
        assert_losses(result, by_hand, kept(inputs), spliced)


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


def test_sinks_are_left_as_they_are(qwen3: Any) -> None:
    model, inputs = copy.deepcopy(qwen3), text_batch()
    model.model.embed_tokens.weight[12] *= 1000
    coders = {1: coder_of(16, 3)}
    [result] = loss_recovered(model, coders, [inputs], special_ids=SPECIAL, sink_factor=10.0).values()
    keep = kept(inputs) & (inputs["input_ids"] != 12)
    assert int(keep.sum()) == int(kept(inputs).sum()) - 1
    assert_losses(result, ByHand(model, inputs), keep, coders)


def test_padding_on_the_left(qwen3: Any) -> None:
    inputs, coders = text_batch(left=True), {1: coder_of(16, 3)}
    [result] = loss_recovered(qwen3, coders, [inputs], special_ids=SPECIAL, sink_factor=None).values()
    assert_losses(result, ByHand(qwen3, inputs), kept(inputs), coders)
    # the first token of a row, predicted from padding, does not count even where it is no special token
    [bare] = loss_recovered(qwen3, coders, [inputs], special_ids=(2,), sink_factor=None).values()
    assert bare.tokens == result.tokens == 11


def test_all_arguments_reach_the_model(qwen3_vl: Any, picture: dict[str, Tensor]) -> None:
    names = ("image_grid_thw", "attention_mask", "mm_token_type_ids")
    positions, _ = qwen3_vl.model.get_rope_index(picture["input_ids"], **{name: picture[name] for name in names})
    odd = {**picture, "position_ids": 2 * positions}
    coders = {2: coder_of(32, 5)}
    [result] = loss_recovered(qwen3_vl, coders, [odd], special_ids=SPECIAL).values()
    assert_losses(result, ByHand(qwen3_vl, odd), kept(odd), coders)
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
    peft = pytest.importorskip("peft")
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
