"""The model that is trained: what is trained of it, LoRA, NF4, the marker's token, and what a run has made of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment.config import LoraConfig
from remind.alignment.step import body_of, head_of
from remind.core.errors import ConfigError, ModelError
from remind.models.backbone import Backbone, backbone_of, inner_model, load_backbone
from remind.models.chat import tokenize
from remind.states.pyramid import MARKER


def opened(
    model: Any, processing_class: Any = None, dtype: str = "float32", device: str = "cpu", quantization: Any = None
) -> Backbone:
    """A model to train, with its tokenizer.

    Args:
        model: a Hugging Face model, or the folder, hub id or built-in name of one.
        processing_class: tokenizer or processor; None: that of the name.
        quantization: quantization config of transformers, for a model given by name.

    Raises:
        ModelError: no such model, one that does not generate text, or no tokenizer.
    """
    if isinstance(model, str | Path):
        backbone = load_backbone(model, dtype, device, quantization)
        if processing_class is not None:
            backbone = backbone_of(backbone.model, processing_class, backbone.name)
    else:
        backbone = backbone_of(model, processing_class)
    if backbone.kind == "encoder":
        raise ModelError(f"{backbone.name} is an encoder; a causal or vision-language model is needed to answer")
    return backbone


def trainable(model: Any, lora: Any, vision: bool = False, marker: int | None = None) -> Any:
    """Set which parameters are trained: the language model and its head, or adapters on it.

    Dropout is off everywhere, since equal contexts must have equal distributions.

    Args:
        lora: `LoraConfig` of the command, or a config of PEFT; None: all weights, or those of the adapters that the
            model has already.
        vision: train the vision tower as well, all of it. Where states hold captions in place of images no gradient
            reaches it.
        marker: a token whose embedding is trained beside the adapters. Without adapters all embeddings are.

    Returns:
        The model, in training mode; wrapped by PEFT where there are adapters.

    Raises:
        ModelError: no such layers or vision tower, or layers that no adapter fits.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    # blocks that cross rows are read back wrongly on CPUs, and give no gradient, silently
    small = {name: m for name, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    if odd := [name for name, layer in small.items() if layer.in_features % 64]:
        raise ModelError(f"{odd[0]} in 4 bits: its input is no multiple of 64; name it in llm_int8_skip_modules")
    tower = getattr(body_of(model), "visual", None) if vision else None
    if vision and tower is None:
        raise ModelError(f"train_vision: {type(model).__name__} has no vision tower")
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, _peft_config(model, lora, tower, marker))
    elif inner_model(model) is model:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        for part in head_of(model)[:2]:
            if part is not None:
                part.requires_grad_(True)
        if tower is not None:
            tower.requires_grad_(True)
    elif vision or marker is not None:
        raise ConfigError("a model that has adapters already can take neither train_vision nor marker_token")
    return model.train()


def _peft_config(model: Any, lora: Any, tower: Any, marker: int | None) -> Any:
    names = {id(module): name for name, module in model.named_modules()}
    config = replace(lora)
    if isinstance(lora, LoraConfig):
        from peft import LoraConfig as PeftConfig

        # vision towers may use the same names, so the pattern is tied to the language model
        blocks = rf"{re.escape(names[id(model.get_decoder())])}\.(.*\.)?"
        for layer in map(re.escape, lora.target_modules):
            if not any(re.fullmatch(blocks + layer, name) for name in names.values()):
                raise ModelError(f"lora: the language model has no layer {layer!r}")
        layers = f"{blocks}({'|'.join(map(re.escape, lora.target_modules))})"
        config = PeftConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=layers, task_type="CAUSAL_LM")
    if getattr(config, "lora_dropout", 0):
        raise ConfigError("lora_dropout must be 0: with dropout, equal contexts have unequal distributions")
    if tower is not None:
        config.modules_to_save = [*(config.modules_to_save or ()), names[id(tower)]]
    if marker is not None and not getattr(config, "trainable_token_indices", None):
        config.trainable_token_indices = {names[id(model.get_input_embeddings())]: [marker]}
    return config


def fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and a sample of the values of all parameters: tells one base model from another.

    At most 64 values of each tensor are read, so that it takes no time on models of any size. Weights in 4 bits, whose
    codes differ from one device to another, count by name.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        if parameter.is_floating_point():
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
            digest.update(f"{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def check_head(model: Any, largest: int = 0) -> None:
    """Raise ModelError unless the model's logits are those of `head_of` at its final hidden states, for all tokens.

    The loss is computed that way; a model that does more to its logits would be trained on others than it generates
    from.

    Args:
        largest: the highest token id of all examples.
    """
    was_training, head, name = model.training, head_of(model), type(model).__name__
    rows = min(len(model.get_input_embeddings().weight), len(head.weight))
    if largest >= rows:
        raise ModelError(f"the tokenizer gives token {largest}, but {name} has {rows}: they belong to different models")
    model.eval()
    ids = torch.arange(1, 5, device=head.weight.device)[None]
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits.float()
    logits = head.wide(torch.float32).logits(hidden)
    model.train(was_training)
    tolerance = 1e-4 if head.weight.dtype in (torch.float32, torch.float64) else 0.05
    if not torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise ModelError(f"{name} does more to its logits than scale, cap and bias; it is not supported")


# the marker as a token of its own (Section 4.3)


def marker_id(tokenizer: Any) -> int | None:
    """The id of the marker's token; None where the marker is plain text."""
    token: int | None = tokenizer.get_added_vocab().get(MARKER)
    return token


@torch.no_grad()
def add_marker(backbone: Backbone) -> int:
    """Give the marker a token of its own, unless it has one; its rows are the mean over the tokens of its text.

    A spare row of the embedding is used where there is one (Qwen's have some hundred); otherwise the embedding grows.
    The same model gives the same rows every time.

    Returns:
        The token's id.
    """
    from tokenizers import AddedToken

    tokenizer, model = backbone.tokenizer, backbone.model
    token = marker_id(tokenizer)
    if token is not None:
        return token
    pieces = tokenize(tokenizer, MARKER).ids
    # not a special token: prompts are tokenised with special tokens written in them as text
    tokenizer.add_tokens([AddedToken(MARKER, special=False, normalized=False)])
    token = marker_id(tokenizer)
    assert token is not None
    if token >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(token + 1, mean_resizing=False)
    rows: list[Tensor] = [model.get_input_embeddings().weight]
    if head_of(model).weight is not rows[0]:
        rows.append(head_of(model).weight)
    for weight in rows:
        weight[token] = weight[pieces].double().mean(0).to(weight.dtype)
    return token
