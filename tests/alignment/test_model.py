"""The model that is trained: the marker's token, 4 bits, the vision tower, and how they go with adapters."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import LoraConfig, Objective, TrainConfig
from remind.alignment.model import (
    add_marker,
    body_of,
    check_head,
    dequantise,
    fingerprint,
    head_weight,
    load,
    marker_id,
    prepare,
    quantise,
    trainable,
)
from remind.alignment.optim import parameter_groups
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.core.errors import ModelError
from remind.models.backbone import Backbone
from remind.models.chat import prompt_ids, tokenize
from remind.models.nano import nano_config, nano_tokenizer
from remind.states.pyramid import MARKER

LORA = LoraConfig(r=4, alpha=8)
TEXT = f"Conversation\n{MARKER}\nAna: the lamp, <|im_end|> {MARKER}!\n{MARKER}\n"


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(states="s", out="o", **settings)


def backbone(tie: bool = True, rows: int | None = None, width: int = 32) -> Backbone:
    """A small Qwen3-VL with nano's tokenizer; `rows` of its embedding."""
    from transformers import Qwen3VLForConditionalGeneration

    shape = nano_config(hidden_size=width, layers=2, vision_size=16)
    shape.tie_word_embeddings = tie
    shape.text_config.vocab_size = rows or shape.text_config.vocab_size
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(shape).eval()
    return Backbone("small", model, nano_tokenizer(), None, "vlm")


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", [True, False], ids=["spare row", "grown"])
def test_the_marker_gets_one_token_once(tie: bool, spare: bool) -> None:
    size = len(nano_tokenizer())
    own = backbone(tie, None if spare else size)
    pieces = tokenize(own.tokenizer, MARKER).ids
    before = [own.model.get_input_embeddings().weight.detach().clone(), head_weight(own.model).detach().clone()]
    assert len(pieces) > 1
    assert marker_id(own.tokenizer) is None
    token = add_marker(own)
    assert token == size
    after = [own.model.get_input_embeddings().weight, head_weight(own.model)]
    assert (after[0] is after[1]) == tie
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new[token], old[pieces].mean(0))
        assert torch.equal(new[:size], old[:size])
        assert len(new) == (len(old) if spare else size + 1)
    with torch.no_grad():
        after[0][token] += 1
    kept = after[0].detach().clone()
    assert add_marker(own) == token
    assert torch.equal(own.model.get_input_embeddings().weight, kept)
    check_head(own.model)


def test_prompts_use_it_and_special_tokens_in_them_stay_text() -> None:
    tokenizer = nano_tokenizer()
    assert marker_id(tokenizer) not in prompt_ids(tokenizer, TEXT)
    own = backbone()
    token = add_marker(own)
    ids = prompt_ids(own.tokenizer, TEXT)
    # not the one that Ana said
    assert ids.count(token) == 2
    end = own.tokenizer.convert_tokens_to_ids("<|im_end|>")
    # the template's own; not the one that was said
    assert ids.count(end) == prompt_ids(tokenizer, "x").count(end)
    assert own.tokenizer.decode(ids) == tokenizer.decode(prompt_ids(tokenizer, TEXT))


def test_a_model_with_the_marker_is_always_the_same_one() -> None:
    plain, one, two = (load(config(marker_token=marked)) for marked in (False, True, True))
    assert fingerprint(one.model) == fingerprint(two.model)
    assert torch.equal(*(own.model.get_input_embeddings().weight for own in (one, two)))
    assert marker_id(plain.tokenizer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_adapters_train_the_row_of_the_marker(tie: bool, dtype: torch.dtype) -> None:
    own = backbone(tie)
    own.model.to(dtype)
    token = add_marker(own)
    ids = torch.tensor([prompt_ids(own.tokenizer, TEXT)])
    start = logits(own.model, ids)
    rows = own.model.get_input_embeddings().weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model: Any = trainable(own.model, LORA, marker=token).eval()
    assert torch.equal(logits(model, ids), start)
    added = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    assert [p.shape for p in added] == [(1, 32)]
    assert added[0].dtype == torch.float32
    assert any(p is added[0] for p in parameter_groups(model, 0.1)[-1]["params"]), "an embedding does not decay"

    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=1e-2)
    for _ in range(3):
        model(input_ids=ids).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model, ids)
    # what the step computes its loss from
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close((hidden @ head_weight(model).T).detach(), trained, rtol=1e-2, atol=1e-2)
    merged = model.merge_and_unload(safe_merge=True)
    weight = merged.get_input_embeddings().weight
    moved = (weight != rows).any(-1).nonzero().flatten().tolist()
    assert moved == [token]
    assert (merged.lm_head.weight is weight) == tie
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits(merged, ids), trained, rtol=tolerance, atol=tolerance)


def test_the_vision_tower_is_trained_by_option_alone() -> None:
    def towers(model: Any) -> set[bool]:
        return {p.requires_grad for name, p in model.named_parameters() if "visual" in name}

    for lora in (None, LORA):
        assert towers(trainable(backbone().model, lora)) == {False}
        model = trainable(backbone().model, lora, vision=True)
        assert towers(model) == {True}
        others = {p.requires_grad for name, p in model.named_parameters() if "visual" not in name}
        assert others == ({True} if lora is None else {True, False})
    from transformers import Qwen3Config, Qwen3ForCausalLM

    text = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1, head_dim=8)
    )  # fmt: skip
    with pytest.raises(ModelError, match="no vision tower"):
        trainable(text, None, vision=True)


def needs_bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")


#: The sixteen values of NF4: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Appendix E).
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


def test_four_bits_are_those_of_nf4() -> None:
    library = needs_bitsandbytes()
    own = backbone(width=64)
    layer = own.model.get_decoder().layers[0].mlp.up_proj
    weight = layer.weight.detach().clone()
    quantise(own.model, "cpu")
    layers = [m for m in own.model.modules() if isinstance(m, library.nn.Linear4bit)]
    assert len(layers) == 2 * 7
    assert not any(isinstance(m, library.nn.Linear4bit) for m in own.model.model.visual.modules())
    assert type(own.model.lm_head) is torch.nn.Linear
    assert layers[0].weight.numel() * layers[0].weight.element_size() == 64 * 64 / 2

    ids = torch.tensor([prompt_ids(own.tokenizer, TEXT)])
    small = logits(own.model, ids)
    dequantise(own.model)
    torch.testing.assert_close(logits(own.model, ids), small, rtol=1e-5, atol=1e-5)
    found = own.model.get_decoder().layers[0].mlp.up_proj.weight
    blocks, exact = found.view(-1, 64), weight.view(-1, 64)
    largest = exact.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4)
    nearest = values[((exact / largest)[..., None] - values).abs().argmin(-1)] * largest
    # the scale of a block is itself rounded to 8 bits
    torch.testing.assert_close(blocks, nearest, rtol=0.02, atol=0)

    # with inputs 32 and 96 wide, blocks would cross rows
    narrow = backbone(width=32)
    quantise(narrow.model, "cpu")
    block = narrow.model.get_decoder().layers[0]
    assert type(block.mlp.up_proj) is type(block.mlp.down_proj) is torch.nn.Linear


def test_adapters_learn_on_four_bits(make_examples: Any) -> None:
    needs_bitsandbytes()
    cfg = config(quantise="nf4", lora=LORA, marker_token=True)
    own = load(cfg)
    plain = load(replace(cfg, quantise=None))
    assert fingerprint(own.model) == f"{fingerprint(plain.model)}/nf4"
    check_head(own.model)
    objective = Objective(chunk=2)

    def gradients(of: Backbone) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = prepare(of, cfg)
        module = AlignmentModel(model, objective)
        run(module, collate(make_examples([(5, 7, 9, 3)]), [1.0]), plan(objective), lambda loss: loss.backward())
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}

    found = gradients(own)
    again = load(cfg)
    dequantise(again.model)
    expected = gradients(again)
    assert found.keys() == expected.keys()
    assert len(found) == 2 * 7 * 4 + 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6)
