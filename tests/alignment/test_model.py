"""The model that is trained: adapters, the marker's token, 4 bits, the vision tower, and how they go together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration, TrainerCallback

from remind import PRAConfig, PRATrainer
from remind.alignment.config import LoraConfig
from remind.alignment.model import add_marker, check_head, marker_id, trainable
from remind.alignment.step import body_of, head_of
from remind.core.errors import ModelError
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids, tokenize
from remind.models.nano import nano_config, nano_tokenizer, save_nano
from remind.states.pyramid import MARKER
from remind.train_pra.run import nf4

LORA = LoraConfig(r=4, alpha=8)
TEXT = f"Conversation\n{MARKER}\nAna: the lamp, <|im_end|> {MARKER}!\n{MARKER}\n"


def backbone(tie: bool = True, rows: int | None = None, width: int = 32) -> Backbone:
    """A small Qwen3-VL with nano's tokenizer; `rows` of its embedding."""
    shape = nano_config(hidden_size=width, layers=2, vision_size=16)
    shape.tie_word_embeddings = tie
    shape.text_config.vocab_size = rows or shape.text_config.vocab_size
    shape.text_config.pad_token_id = None
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(shape).eval()
    return Backbone("small", model, nano_tokenizer(), None, "vlm")


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits
    return found


class Gradients(TrainerCallback):
    """What the optimiser is given in the last step."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# the marker as a token


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", [True, False], ids=["spare row", "grown"])
def test_the_marker_gets_one_token_once(tie: bool, spare: bool) -> None:
    size = len(nano_tokenizer())
    own = backbone(tie, None if spare else size)
    pieces = tokenize(own.tokenizer, MARKER).ids
    before = [own.model.get_input_embeddings().weight.detach().clone(), head_of(own.model).weight.detach().clone()]
    assert len(pieces) > 1
    assert marker_id(own.tokenizer) is None
    token = add_marker(own)
    assert token == size
    after = [own.model.get_input_embeddings().weight, head_of(own.model).weight]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_adapters_train_the_row_of_the_marker(tie: bool, dtype: torch.dtype) -> None:
    own = backbone(tie)
    own.model.to(dtype)
    token = add_marker(own)
    ids = torch.tensor([prompt_ids(own.tokenizer, TEXT)])
    start = logits(own.model, ids)
    rows = own.model.get_input_embeddings().weight.detach().clone()
    model: Any = trainable(own.model, LORA, marker=token).eval()
    assert torch.equal(logits(model, ids), start)
    added = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    assert [p.shape for p in added] == [(1, 32)]
    assert added[0].dtype == torch.float32

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=ids).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model, ids)
    # what the step computes its loss from
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(head_of(model).logits(hidden).detach(), trained, rtol=1e-2, atol=1e-2)
    merged = model.merge_and_unload(safe_merge=True)
    weight = merged.get_input_embeddings().weight
    moved = (weight != rows).any(-1).nonzero().flatten().tolist()
    assert moved == [token]
    assert (merged.lm_head.weight is weight) == tie
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits(merged, ids), trained, rtol=tolerance, atol=tolerance)


# what is trained


def test_adapters_are_on_the_language_model_alone() -> None:
    """Where the vision tower has layers of the same names."""
    own = backbone()
    own.model.model.visual.q_proj = nn.Linear(16, 16)
    names = {name for name, p in trainable(own.model, LORA).named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * 2
    assert all("language_model.layers" in name and "lora_" in name for name in names)
    with pytest.raises(ModelError, match=r"^lora: the language model has no layer 'odd_proj'$"):
        trainable(backbone().model, LoraConfig(r=2, target_modules=("q_proj", "odd_proj")))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_vision_tower_is_trained_by_option_alone(lora: LoraConfig | None) -> None:
    def towers(model: Any) -> set[bool]:
        return {p.requires_grad for name, p in model.named_parameters() if "visual" in name and "original" not in name}

    assert towers(trainable(backbone().model, lora)) == {False}
    model = trainable(backbone().model, lora, vision=True)
    assert towers(model) == {True}
    others = {p.requires_grad for name, p in model.named_parameters() if "visual" not in name}
    assert others == ({True} if lora is None else {True, False})
    small = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    text = Qwen3ForCausalLM(Qwen3Config(**small, num_attention_heads=1, num_key_value_heads=1))
    with pytest.raises(ModelError, match="no vision tower"):
        trainable(text, lora, vision=True)


def test_a_model_with_adapters_of_its_own_is_trained_as_it_is(make_record: Any, tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    nano = load_backbone("nano-untrained")
    model = get_peft_model(nano.model, PeftConfig(r=2, target_modules=["down_proj"], task_type="CAUSAL_LM"))
    args = PRAConfig(str(tmp_path), max_steps=1, warmup_steps=0, learning_rate=1e-2, disable_tqdm=True)
    trainer = PRATrainer(model, args, [make_record(0)], processing_class=nano.tokenizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("down_proj.lora_" in name for name in moved)


# what is refused, and what tells models apart


def test_a_tokenizer_of_another_model_is_refused(make_record: Any, tmp_path: Path) -> None:
    own = backbone(rows=300)
    with pytest.raises(ModelError, match=r"^the tokenizer gives token \d+, but \w+ has 300: [^\n]*$"):
        PRATrainer(own.model, PRAConfig(str(tmp_path)), [make_record(0)], processing_class=own.tokenizer)
    check_head(own.model, 299)
    own.model.lm_head = nn.Linear(32, 200, bias=False)
    with pytest.raises(ModelError, match="has 200"):
        check_head(own.model, 299)


# 4 bits


#: The sixteen values of NF4: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Appendix E).
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")


def saved(folder: Path, width: int) -> str:
    save_nano(folder, hidden_size=width, layers=2, vision_size=64)
    backbone(width=width).model.save_pretrained(folder)
    return str(folder)


def test_four_bits_are_those_of_nf4(tmp_path: Path, bitsandbytes: Any) -> None:
    name = saved(tmp_path / "wide", 64)
    weight = load_backbone(name).model.get_decoder().layers[0].mlp.up_proj.weight.detach()
    own = load_backbone(name, quantization=nf4("float32"))
    small = {layer for layer, m in own.model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    decoder = own.model.get_decoder()
    linear = {layer for layer, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    assert small == {f"model.language_model.{layer}" for layer in linear}
    assert len(small) == 2 * 7
    packed = decoder.layers[0].mlp.up_proj.weight
    assert packed.numel() * packed.element_size() == weight.numel() / 2

    ids = torch.tensor([prompt_ids(own.tokenizer, TEXT)])
    before = logits(own.model, ids)
    plain = own.model.dequantize()
    torch.testing.assert_close(logits(plain, ids), before, rtol=1e-5, atol=1e-5)
    blocks, exact = plain.get_decoder().layers[0].mlp.up_proj.weight.view(-1, 64), weight.view(-1, 64)
    largest = exact.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4)
    nearest = values[((exact / largest)[..., None] - values).abs().argmin(-1)] * largest
    torch.testing.assert_close(blocks, nearest, rtol=0.02, atol=1e-6)


def test_layers_whose_blocks_would_cross_rows_are_refused(tmp_path: Path, bitsandbytes: Any) -> None:
    model = load_backbone(saved(tmp_path / "narrow", 96), quantization=nf4("float32")).model
    with pytest.raises(ModelError, match=r"^model\.language_model\.layers\.0\.\S+ in 4 bits: [^\n]*$"):
        trainable(model, LORA)


def test_adapters_learn_on_four_bits(tmp_path: Path, make_record: Any, bitsandbytes: Any) -> None:
    """The gradients are those on a model in float32 with the values that the bits stand for."""
    name = saved(tmp_path / "base", 64)
    args = {"max_steps": 2, "batch_size": 2, "marker_token": True, "warmup_steps": 0, "max_grad_norm": 0.0}
    rows = [make_record(n) for n in range(3)]
    found, expected = Gradients(), Gradients()

    def trainer_of(model: Any, watch: Gradients, **more: Any) -> PRATrainer:
        config = PRAConfig(str(tmp_path / str(*more)), **args, disable_tqdm=True, use_cpu=True)
        return PRATrainer(model, config, rows, peft_config=LORA, callbacks=[watch], **more)

    small = trainer_of(name, found, quantization_config=nf4("float32"))
    kept = load_backbone(name, quantization=nf4("float32"))
    plain = trainer_of(kept.model.dequantize(), expected, processing_class=kept.tokenizer)
    first = copy.deepcopy({n: p for n, p in small.model.named_parameters() if p.requires_grad})
    small.train()
    plain.train()
    assert found.seen.keys() == expected.seen.keys() == first.keys()
    assert len(found.seen) == 2 * 7 * 2 + 1
    for each, value in expected.seen.items():
        assert float(value.norm()) > 0, each
        assert float((found.seen[each] - value).norm()) < 1e-3 * float(value.norm()), each
    assert all(not torch.equal(p, first[n]) for n, p in small.model.named_parameters() if p.requires_grad)
