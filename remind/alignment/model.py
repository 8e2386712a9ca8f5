"""The model that is trained: loading, what is trained of it, LoRA, NF4 and the marker's token."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment import checkpoint
from remind.alignment.config import LoraConfig, TrainConfig
from remind.alignment.run_folder import read_config
from remind.core import optional
from remind.core.errors import ModelError
from remind.models.backbone import Backbone, inner_model
from remind.models.chat import tokenize
from remind.models.load import load_backbone
from remind.states.pyramid import MARKER

_FINGERPRINT = "remind_fingerprint"
#: Weights that share a scale in NF4.
_BLOCK = 64


def load(cfg: TrainConfig, device: str = "cpu") -> Backbone:
    """The base model with its tokenizer: the marker is given its token and layers are quantised, if asked for.

    Raises:
        ModelError: one that does not generate text, or no bitsandbytes for a model in 4 bits.
    """
    if cfg.quantise is not None:
        bitsandbytes()
    backbone = load_backbone(cfg.model, dtype=cfg.dtype, device="cpu" if cfg.quantise is not None else device)
    if backbone.kind == "encoder":
        raise ModelError(f"{cfg.model} is an encoder; a causal or vision-language model is needed to answer")
    if cfg.marker_token:
        add_marker(backbone)
    if cfg.quantise is not None:
        # codes may differ from one kind of device to another; the model is the same one
        setattr(backbone.model, _FINGERPRINT, f"{fingerprint(backbone.model)}/{cfg.quantise}")
        quantise(backbone.model, device)
    return backbone


def trainable(model: Any, lora: LoraConfig | None, vision: bool = False, marker: int | None = None) -> nn.Module:
    """Set which parameters are trained: the language model and its head, or adapters on it.

    Dropout is off everywhere, since equal contexts must have equal distributions.

    Args:
        vision: train the vision tower as well, all of it. Where states hold captions in place of images no gradient
            reaches it.
        marker: a token whose embedding is trained beside the adapters. Without adapters all embeddings are.

    Returns:
        The model, in training mode; wrapped by PEFT where there are adapters.

    Raises:
        ModelError: no such layers or vision tower, or adapters without the package peft.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.requires_grad_(False)
    tower = getattr(body_of(model), "visual", None) if vision else None
    if vision and tower is None:
        raise ModelError(f"train_vision: {type(model).__name__} has no vision tower")
    if lora is None:
        model.get_decoder().requires_grad_(True)
        head_weight(model).requires_grad_(True)
    else:
        with warnings.catch_warnings():
            # peft still asks by the old name, which is nothing that a user could change
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            model = optional("peft", "LoRA").get_peft_model(model, _peft_config(model, lora, marker))
        for name, parameter in model.named_parameters():
            # in bfloat16 the row of the marker would not move at small learning rates
            if parameter.requires_grad and "trainable_tokens" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if tower is not None:
        tower.requires_grad_(True)
    trained: nn.Module = model.train()
    return trained


def prepare(backbone: Backbone, cfg: TrainConfig) -> nn.Module:
    """The model of `load`, set to train what `cfg` says (see `trainable`)."""
    marker = marker_id(backbone.tokenizer) if cfg.marker_token else None
    return trainable(backbone.model, cfg.lora, cfg.train_vision, marker)


def trained_backbone(run: str | Path, device: str = "cpu") -> Backbone:
    """What a run has learned so far: its base model with the weights of the newest whole checkpoint, in eval mode.

    Raises:
        ConfigError: no run folder. ModelError: no checkpoint, or another base model than the run's.
    """
    cfg = read_config(run)
    folder = checkpoint.newest(Path(run), report=False)
    if folder is None:
        raise ModelError(f"{run}: no checkpoints")
    backbone, model = restored(cfg, folder)
    return replace(backbone, name=str(run), model=model.to(device).eval())


def restored(cfg: TrainConfig, folder: Path) -> tuple[Backbone, Any]:
    """The base model of a run, and as it is trained, with the weights of a checkpoint.

    Raises:
        ModelError: another base model than the run's, or a damaged checkpoint.
    """
    backbone = load(cfg)
    if fingerprint(backbone.model) != checkpoint.read_state(folder)["base_fingerprint"]:
        raise ModelError(f"{cfg.model} is not the model that {cfg.out} was trained from; give it as base")
    model = prepare(backbone, cfg)
    checkpoint.restore_model(folder, model)
    return backbone, model


def _peft_config(model: Any, lora: LoraConfig, marker: int | None) -> Any:
    names = {id(module): name for name, module in model.named_modules()}
    # vision towers may use the same names, so the pattern is tied to the language model
    decoder = re.escape(names[id(model.get_decoder())])
    for layer in lora.target_modules:
        if not any(re.fullmatch(rf"{decoder}\.(.*\.)?{re.escape(layer)}", name) for name in names.values()):
            raise ModelError(f"lora: the language model has no layer {layer!r}")
    return optional("peft", "LoRA").LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=rf"{decoder}\.(.*\.)?({'|'.join(map(re.escape, lora.target_modules))})",
        task_type="CAUSAL_LM",
        trainable_token_indices=None if marker is None else {names[id(model.get_input_embeddings())]: [marker]},
    )


def body_of(model: Any) -> Any:
    """The Hugging Face model without its output head; ends in the final norm. Sees through a PEFT wrapper."""
    model = inner_model(model)
    body = getattr(model, model.base_model_prefix, None)
    if body is None or body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head")
    return body


def head_weight(model: Any) -> Tensor:
    """[V, d] of the output head."""
    model = inner_model(model)
    head = model.get_output_embeddings()
    # PEFT wraps a tied head of which it trains single rows; `weight` of the wrapper has them in it
    plain = head.original_module if hasattr(head, "token_adapter") else head
    if type(plain) is not nn.Linear or plain.bias is not None:
        raise ModelError(f"the output head of {type(model).__name__} is not a plain matrix: {type(head).__name__}")
    weight: Tensor = head.weight
    return weight


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
    stored = getattr(model, _FINGERPRINT, None)
    if stored is not None:
        return str(stored)
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
                "they belong to different models"
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
    logits = hidden.float() @ weight.float().T
    model.train(was_training)
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    if not torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise ModelError(
            f"{type(model).__name__} does more to its logits than multiply by the head; it is not supported"
        )


# the marker as a token of its own (Section 4.3)


def marker_id(tokenizer: Any) -> int | None:
    """The id of the marker's token; None where the marker is plain text."""
    token: int | None = tokenizer.get_added_vocab().get(MARKER)
    return token


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
    if head_weight(model) is not rows[0]:
        rows.append(head_weight(model))
    with torch.no_grad():
        for weight in rows:
            weight[token] = weight[pieces].double().mean(0).to(weight.dtype)
    return token


# a base model in 4 bits (NF4), as QLoRA trains adapters on it


def bitsandbytes() -> Any:
    """The library, imported on first use. Raises ModelError where it is missing or does not load."""
    return optional("bitsandbytes", "A base in 4 bits")


def quantise(model: Any, device: str) -> None:
    """Put the linear layers of the language model's blocks in NF4, in place, and the model on `device`.

    Embeddings, head, norms and vision tower stay as they are. Products are computed in the precision the layer had.
    A layer at a time goes to the device, so that it never holds the model as it was. Layers whose input is not a
    multiple of 64 wide stay too.
    """
    library = bitsandbytes()
    decoder = model.get_decoder()
    for name, layer in _suited(decoder):
        out, width = layer.weight.shape
        small = library.nn.Linear4bit(
            width, out, layer.bias is not None, compute_dtype=layer.weight.dtype, quant_type="nf4", device="meta"
        )
        small.weight = library.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        small.bias = layer.bias
        # on some CPUs an eval forward would pack the weights anew for good, and then give no gradient, silently
        small.support_avx512bf16_for_cpu = False
        decoder.set_submodule(name, small.to(device))
    model.to(device)
    # PEFT looks for this to choose its adapters
    model.is_loaded_in_4bit = True


def _suited(decoder: nn.Module) -> list[tuple[str, nn.Linear]]:
    linear = [(name, layer) for name, layer in decoder.named_modules() if type(layer) is nn.Linear]
    # others have blocks that cross rows, which bitsandbytes reads back wrongly on CPUs
    return [(name, layer) for name, layer in linear if layer.in_features % _BLOCK == 0]


def left_alone(model: Any) -> list[str]:
    """Full names of the linear layers that `quantise` leaves as they are."""
    chosen = {id(layer) for _, layer in _suited(model.get_decoder())}
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and id(layer) not in chosen]


def dequantise(model: Any) -> None:
    """Replace layers in NF4 by plain ones with the values that they stand for, in place."""
    library = bitsandbytes()
    decoder = model.get_decoder()
    layers = [(name, layer) for name, layer in decoder.named_modules() if isinstance(layer, library.nn.Linear4bit)]
    for name, layer in layers:
        weight = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.to(layer.compute_dtype), requires_grad=False)
        plain.bias = layer.bias
        decoder.set_submodule(name, plain)
    model.is_loaded_in_4bit = False
