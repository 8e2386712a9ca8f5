"""The model that is trained: loaded, frozen where text does not reach, with adapters if asked for, without dropout."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import nn

from remind.alignment import nf4
from remind.alignment.config import LoraConfig, TrainConfig
from remind.alignment.marker import add_marker, marker_id
from remind.alignment.step import body_of, head_weight
from remind.core.errors import ModelError
from remind.models.backbone import Backbone
from remind.models.load import load_backbone

_FINGERPRINT = "remind_fingerprint"


def load(cfg: TrainConfig, device: str = "cpu") -> Backbone:
    """The base model with its tokenizer: the marker is given its token and layers are quantised, if asked for.

    Raises:
        ModelError: one that does not generate text, or no bitsandbytes for a model in 4 bits.
    """
    if cfg.quantise is not None:
        nf4.bitsandbytes()
    backbone = load_backbone(cfg.model, dtype=cfg.dtype, device="cpu" if cfg.quantise is not None else device)
    if backbone.kind == "encoder":
        raise ModelError(f"{cfg.model} is an encoder; a causal or vision-language model is needed to answer")
    if cfg.marker_token:
        add_marker(backbone)
    if cfg.quantise is not None:
        # codes may differ from one kind of device to another; the model is the same one
        setattr(backbone.model, _FINGERPRINT, f"{fingerprint(backbone.model)}/{cfg.quantise}")
        nf4.quantise(backbone.model, device)
    return backbone


def trainable(model: Any, lora: LoraConfig | None, vision: bool = False, marker: int | None = None) -> nn.Module:
    """Switch on the parameters that are trained: the language model and its head, or adapters on it.

    Dropout is off everywhere, since equal contexts must have equal distributions.

    Args:
        vision: train the vision tower as well, all of it. Where states hold captions in place of images no gradient
            reaches it.
        marker: a token whose embedding is trained beside the adapters. Without adapters all embeddings are.

    Returns:
        The model, in training mode; wrapped by PEFT where there are adapters.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.requires_grad_(False)
    tower = _tower(model) if vision else None
    if lora is None:
        model.get_decoder().requires_grad_(True)
        head_weight(model).requires_grad_(True)
    else:
        from peft import get_peft_model

        model = get_peft_model(model, _peft_config(model, lora, marker))
        for name, parameter in model.named_parameters():
            # in bfloat16 the row of the marker would not move at small learning rates
            if parameter.requires_grad and "trainable_tokens" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if tower is not None:
        tower.requires_grad_(True)
    return _module(model.train())


def prepare(backbone: Backbone, cfg: TrainConfig) -> nn.Module:
    """The model of `load` with the parameters switched on that `cfg` trains (see `trainable`)."""
    marker = marker_id(backbone.tokenizer) if cfg.marker_token else None
    return trainable(backbone.model, cfg.lora, cfg.train_vision, marker)


def _tower(model: Any) -> nn.Module:
    tower = getattr(body_of(model), "visual", None)
    if tower is None:
        raise ModelError(f"train_vision: {type(model).__name__} has no vision tower")
    return _module(tower)


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _peft_config(model: Any, lora: LoraConfig, marker: int | None) -> Any:
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
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=pattern,
        task_type="CAUSAL_LM",
        trainable_token_indices=None if marker is None else {_embedding(model): [marker]},
    )


def _embedding(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_input_embeddings())


def checkpoint_activations(model: Any) -> None:
    """Compute the activations inside each block again in the backward pass instead of keeping them."""
    # the name before transformers 5.2x; reentrant checkpointing can lose gradients of adapters without a word
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and a sample of the values of all parameters: tells one base model from another.

    At most 64 values of each tensor are read, so that it takes no time on models of any size. For a model in 4 bits it
    is that of the weights it was made from, and says so.
    """
    known = getattr(model, _FINGERPRINT, None)
    if known is not None:
        return str(known)
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def check_vocabulary(model: Any, largest: int) -> None:
    """Raise ModelError where the tokenizer gives ids that the embedding or the head has no row for.

    Args:
        largest: the highest token id of all examples.
    """
    for what, rows in (("embedding", model.get_input_embeddings().weight), ("head", head_weight(model))):
        if largest >= len(rows):
            raise ModelError(
                f"the tokenizer gives token {largest}, but the {what} of {type(model).__name__} has {len(rows)} rows: "
                "they are not of one model"
            )


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
