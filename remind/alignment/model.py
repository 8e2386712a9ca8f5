"""The model that is trained: loaded, frozen where text does not reach, with adapters if asked for, without dropout."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import nn

from remind.alignment.config import LoraConfig, TrainConfig
from remind.alignment.step import body_of, head_weight
from remind.backbone import Backbone, load_backbone
from remind.errors import ModelError


def load(cfg: TrainConfig, device: str = "cpu") -> Backbone:
    """The base model with its tokenizer. Raises ModelError for one that does not generate text."""
    backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=device)
    if backbone.kind == "encoder":
        raise ModelError(f"{cfg.model} is an encoder; a causal or vision-language model is needed to answer")
    return backbone


def trainable(model: Any, lora: LoraConfig | None) -> nn.Module:
    """Switch on the parameters that are trained: the language model and its head, or adapters on it.

    The vision tower stays frozen: states hold captions in place of images, so no gradient would reach it. Dropout is
    off everywhere, since equal contexts must have equal distributions.

    Returns:
        The model, in training mode; wrapped by PEFT where there are adapters.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.requires_grad_(False)
    if lora is None:
        model.get_decoder().requires_grad_(True)
        head_weight(model).requires_grad_(True)
        return _module(model.train())
    from peft import get_peft_model

    return _module(get_peft_model(model, _peft_config(model, lora)).train())


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _peft_config(model: Any, lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    # vision towers may use the same names, so the pattern is tied to the language model
    names = "|".join(map(re.escape, lora.target_modules))
    pattern = rf"{re.escape(decoder)}\.(.*\.)?({names})"
    for name in lora.target_modules:
        if not any(
            re.fullmatch(rf"{re.escape(decoder)}\.(.*\.)?{re.escape(name)}", n) for n, _ in model.named_modules()
        ):
            raise ModelError(f"lora: the language model has no layer {name!r}")
    return PeftConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules=pattern, task_type="CAUSAL_LM"
    )


def checkpoint_activations(model: Any) -> None:
    """Compute the activations inside each block again in the backward pass instead of keeping them."""
    # the name before transformers 5.2x; reentrant checkpointing can lose gradients of adapters without a word
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and a sample of the values of all parameters: tells one base model from another.

    At most 64 values of each tensor are read, so that it takes no time on models of any size.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise ModelError unless the model's logits are its final hidden states times the head's matrix.

    The loss is computed that way; a model that scales or caps its logits would be trained on others than it generates
    from.
    """
    was_training = model.training
    model.eval()
    weight = head_weight(model)
    ids = torch.arange(1, 5, device=weight.device)[None]
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits.float()
    found = hidden.float() @ weight.float().T
    model.train(was_training)
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise ModelError(
            f"{type(model).__name__} does more to its logits than multiply by the head; it is not supported"
        )
