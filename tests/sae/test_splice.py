"""Loss recovered against a forward written out block by block, in float64, and against cases with known answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import LayerError, SparseCodes, TopKSAE
from sae.errors import ActivationError, ConfigError, ShapeError
from sae.harvest import harvest
from sae.splice import LossRecovered, loss_recovered

Edit = Callable[[Tensor], Tensor]
SPECIAL = (1, 2, 45, 47, 48)
WIDTH = {"gpt2": 16, "qwen3": 16, "qwen3_vl": 32}


def text_batch(left: bool = False) -> dict[str, Tensor]:
    real = [[1, 10, 11, 12, 13, 14, 2, 30, 31], [1, 20, 21, 22, 23, 2]]
    rows = [([0] * (9 - len(row)) + row) if left else (row + [0] * (9 - len(row))) for row in real]
    ids = torch.tensor(rows)
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


def exact_coder(d: int) -> TopKSAE:
    """ReLU(h) - ReLU(-h) = h."""
    coder = TopKSAE(d, 2 * d, 2 * d).double().requires_grad_(False)
    both = torch.cat([torch.eye(d), -torch.eye(d)]).double()
    coder.W_dec.copy_(both)
    coder.W_enc.copy_(both.t())
    return coder


class ByHand:
    """A model's blocks, run one after the other in a loop of our own."""

    def __init__(self, model: Any, inputs: dict[str, Tensor]) -> None:
        text = model.transformer if hasattr(model, "transformer") else model.model
        text = getattr(text, "language_model", text)
        self.blocks = text.h if hasattr(text, "h") else text.layers
        self.norm = text.ln_f if hasattr(text, "ln_f") else text.norm
        self.head = model.lm_head
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


def counted(inputs: dict[str, Tensor]) -> list[tuple[int, int]]:
    """(row, position) of the predictions that count, by the words of the documentation."""
    ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
    return [
        (row, t)
        for row in range(len(ids))
        for t in range(len(ids[row]) - 1)
        if mask[row][t] and mask[row][t + 1] and ids[row][t + 1] not in SPECIAL
    ]


def cross_entropy(logits: Tensor, inputs: dict[str, Tensor]) -> float:
    places = counted(inputs)
    total = sum(
        float(logits[row, t].logsumexp(0) - logits[row, t, inputs["input_ids"][row, t + 1]]) for row, t in places
    )
    return total / len(places)


def kl(clean: Tensor, other: Tensor, inputs: dict[str, Tensor]) -> float:
    places = counted(inputs)
    p, q = clean.softmax(-1), other.softmax(-1)
    return sum(float((p[place] * (p[place] / q[place]).log()).sum()) for place in places) / len(places)


def kept(inputs: dict[str, Tensor]) -> Tensor:
    """Tokens to replace: not padding, not special; visual ones are among them."""
    ids = inputs["input_ids"]
    special = torch.tensor([[int(token) in SPECIAL and int(token) != 45 for token in row] for row in ids])
    return inputs["attention_mask"].bool() & ~special


def at(keep: Tensor, make: Edit) -> Edit:
    return lambda h: torch.where(keep[..., None], make(h), h)


def test_every_layer_against_a_forward_by_hand(case: tuple[Any, dict[str, Tensor], int]) -> None:
    model, inputs, d = case
    by_hand = ByHand(model, inputs)
    last = len(by_hand.blocks)
    coders = {layer: coder_of(d, layer) for layer in (0, 1, 2, last)}
    results = loss_recovered(model, coders, [inputs], special_ids=SPECIAL, sink_factor=None)
    keep = kept(inputs)
    _, clean = by_hand({})
    torch.testing.assert_close(clean, by_hand.own_logits, rtol=0, atol=1e-12)
    assert list(results) == [0, 1, 2, last, "all"]
    for name, result in results.items():
        layers = list(coders) if name == "all" else [name]
        _, spliced = by_hand({layer: at(keep, coders[layer]) for layer in layers})
        _, zero = by_hand({layer: at(keep, torch.zeros_like) for layer in layers})
        loss = {
            run: cross_entropy(logits, inputs)
            for run, logits in (("clean", clean), ("spliced", spliced), ("zero", zero))
        }
        assert len({round(value, 9) for value in loss.values()}) == 3
        for run, value in loss.items():
            assert getattr(result, f"ce_{run}") == pytest.approx(value, abs=1e-9), (name, run)
        expected = (loss["zero"] - loss["spliced"]) / (loss["zero"] - loss["clean"])
        assert result.recovered == pytest.approx(expected, rel=1e-6), name
        assert result.kl == pytest.approx(kl(clean, spliced, inputs), abs=1e-9)
        assert result.kl_zero == pytest.approx(kl(clean, zero, inputs), abs=1e-9)
        assert result.tokens == len(counted(inputs))
        assert result.replaced == int(keep.sum())


class Watching(TopKSAE):
    """A coder that remembers what it was given."""

    def encode(self, h: Tensor) -> SparseCodes:
        self.seen = h
        return super().encode(h)


@pytest.mark.parametrize("layer", [0, 1, 2, 4])
def test_the_coder_reads_what_harvesting_read(qwen3_vl: Any, picture: dict[str, Tensor], layer: int) -> None:
    [tokens] = harvest(qwen3_vl, [picture], [layer], special_ids=SPECIAL)
    coder = Watching(32, 40, 3).double().requires_grad_(False)
    loss_recovered(qwen3_vl, {layer: coder}, [picture], special_ids=SPECIAL)
    assert int(tokens.visual.sum()) == 6
    assert torch.equal(coder.seen, tokens.activations[layer])


def test_an_exact_coder_recovers_everything(case: tuple[Any, dict[str, Tensor], int]) -> None:
    model, inputs, d = case
    results = loss_recovered(model, {1: exact_coder(d), 2: exact_coder(d)}, [inputs], special_ids=SPECIAL)
    for result in results.values():
        assert result.recovered == 1
        assert result.kl == 0
        assert result.ce_zero != result.ce_clean


def test_a_coder_that_gives_zeros_recovers_nothing(case: tuple[Any, dict[str, Tensor], int]) -> None:
    model, inputs, d = case
    nothing = coder_of(d, 0)
    nothing.W_dec.zero_()
    nothing.b_dec.zero_()
    results = loss_recovered(model, {1: nothing, 2: nothing}, [inputs], special_ids=SPECIAL)
    for result in results.values():
        assert result.recovered == 0
        assert result.kl == result.kl_zero > 0


def test_sinks_are_left_as_they_are(qwen3: Any) -> None:
    model, inputs = copy.deepcopy(qwen3), text_batch()
    model.model.embed_tokens.weight[12] *= 1000
    by_hand = ByHand(model, inputs)
    coder = coder_of(16, 3)
    [result] = loss_recovered(model, {1: coder}, [inputs], special_ids=SPECIAL, sink_factor=10.0).values()
    keep = kept(inputs) & (inputs["input_ids"] != 12)
    assert result.replaced == int(keep.sum()) == int(kept(inputs).sum()) - 1
    for run, make in (("spliced", coder), ("zero", torch.zeros_like)):
        logits = by_hand({1: at(keep, make)})[1]
        assert getattr(result, f"ce_{run}") == pytest.approx(cross_entropy(logits, inputs), abs=1e-9)


def test_padding_on_the_left(qwen3: Any) -> None:
    inputs = text_batch(left=True)
    by_hand = ByHand(qwen3, inputs)
    coder = coder_of(16, 3)
    [result] = loss_recovered(qwen3, {1: coder}, [inputs], special_ids=SPECIAL, sink_factor=None).values()
    # the first token of a row, predicted from padding, does not count even where it is no special token
    assert result.tokens == len(counted(inputs)) == 11
    logits = by_hand({1: at(kept(inputs), coder)})[1]
    assert result.ce_spliced == pytest.approx(cross_entropy(logits, inputs), abs=1e-9)
    assert result.ce_clean == pytest.approx(cross_entropy(by_hand.own_logits, inputs), abs=1e-9)
    [bare] = loss_recovered(qwen3, {1: coder}, [inputs], special_ids=(2,), sink_factor=None).values()
    assert bare.tokens == 11


def test_all_arguments_reach_the_model(qwen3_vl: Any, picture: dict[str, Tensor]) -> None:
    types = picture["mm_token_type_ids"]
    positions, _ = qwen3_vl.model.get_rope_index(
        picture["input_ids"],
        image_grid_thw=picture["image_grid_thw"],
        attention_mask=picture["attention_mask"],
        mm_token_type_ids=types,
    )
    odd = {**picture, "position_ids": 2 * positions}
    coder = coder_of(32, 5)
    [result] = loss_recovered(qwen3_vl, {2: coder}, [odd], special_ids=SPECIAL).values()
    by_hand = ByHand(qwen3_vl, odd)
    assert result.ce_clean == pytest.approx(cross_entropy(by_hand.own_logits, odd), abs=1e-9)
    assert result.ce_spliced == pytest.approx(cross_entropy(by_hand({2: at(kept(odd), coder)})[1], odd), abs=1e-9)
    [usual] = loss_recovered(qwen3_vl, {2: coder}, [picture], special_ids=SPECIAL).values()
    assert abs(usual.ce_clean - result.ce_clean) > 1e-6
    labelled = {**picture, "labels": picture["input_ids"], "logits_to_keep": 1}
    [same] = loss_recovered(qwen3_vl, {2: coder}, [labelled], special_ids=SPECIAL).values()
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
    n, m = run(first)[1], run(second)[1]
    assert whole[1].ce_spliced == pytest.approx((n.tokens * n.ce_spliced + 3 * m.ce_spliced) / (n.tokens + 3))


def test_peft_models_are_spliced_too(qwen3: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    wrapped = peft.get_peft_model(copy.deepcopy(qwen3), config).eval()
    coders = {1: coder_of(16, 1)}
    [expected] = loss_recovered(qwen3, coders, [text_batch()]).values()
    [result] = loss_recovered(wrapped, coders, [text_batch()]).values()
    torch.testing.assert_close(result.sums(), expected.sums())


def test_inputs_that_cannot_be_used(qwen3: Any) -> None:
    coders, batch = {1: coder_of(16, 1)}, text_batch()
    with pytest.raises(ConfigError, match="no coder"):
        loss_recovered(qwen3, {}, [batch])
    with pytest.raises(LayerError):
        loss_recovered(qwen3, {9: coders[1]}, [batch])
    with pytest.raises(ShapeError, match=r"batch 0: .* attention_mask"):
        loss_recovered(qwen3, coders, [{**batch, "attention_mask": torch.ones(2, 1, 9, 9)}])
    with pytest.raises(ActivationError, match="nothing to predict"):
        loss_recovered(qwen3, coders, [{"input_ids": torch.tensor([[5], [6]])}])
    [empty] = loss_recovered(qwen3, coders, [], allow_empty=True).values()
    summary = json.loads(json.dumps(empty.summary(), allow_nan=False))
    assert summary["tokens"] == 0
    assert summary["recovered"] is summary["kl"] is None
    broken = copy.deepcopy(qwen3)
    broken.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(ActivationError, match="batch 0: hidden states of layer 1 are not finite"):
        loss_recovered(broken, coders, [batch])
    endless = coder_of(16, 1)
    endless.W_dec.fill_(float("inf"))
    with pytest.raises(ActivationError, match="batch 1: the loss with layer 1 replaced is not finite"):
        loss_recovered(qwen3, {1: endless}, [{"input_ids": torch.tensor([[5]])}, batch])
    endless.b_dec.fill_(float("inf"))
    with pytest.raises(ActivationError, match="batch 0, layer 1: "):
        loss_recovered(qwen3, {1: endless}, [batch])
