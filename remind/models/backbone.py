"""A model with its tokenizer and processor: position ids, hidden states, chats with images."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from remind.core.errors import ModelError
from remind.models.chat import Message, Tokens, chat_ids, tokenize
from remind.models.images import image_inputs, image_parts, image_processor

Kind = Literal["vlm", "causal", "encoder"]


class ImageProcessor:
    """Processor of images and text, without the video processor of Qwen3-VL's, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


def max_length(config: Any, tokenizer: Any, kind: Kind) -> int:
    """Tokens a model with this configuration can take at once, special tokens included."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    declared = tokenizer.model_max_length
    if limit is None:
        return int(declared)
    # RoBERTa counts positions from 2, which its tokenizer accounts for; tokenizers of decoders often declare less
    return int(min(limit, declared)) if kind == "encoder" else int(limit)


@dataclass
class Backbone:
    """A model, ready for reading hidden states or generating.

    Attributes:
        name: name, folder or hub id it was loaded by.
        model: in eval mode.
        tokenizer: a fast one (character offsets are needed).
        processor: has an `image_processor`; None for text models.
        kind: "vlm", "causal" or "encoder".
    """

    name: str
    model: Any
    tokenizer: Any
    processor: Any
    kind: Kind

    @property
    def n_layers(self) -> int:
        """Blocks of the language model; hidden states are numbered 0 (embeddings) to n_layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def causal(self) -> bool:
        """Whether a token's state depends on earlier tokens only."""
        return self.kind != "encoder"

    @property
    def max_length(self) -> int:
        """Tokens the model can take at once, special tokens included."""
        return max_length(self.model.config, self.tokenizer, self.kind)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def tokenize(self, text: str) -> Tokens:
        """`text` as plain text: no special tokens are added or recognised in it."""
        return tokenize(self.tokenizer, text)

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Special tokens the tokenizer adds before and after a text: [CLS] and [SEP], a BOS, often none."""
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("a")["input_ids"]
        start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
        return list(framed[:start]), list(framed[start + len(plain) :])

    def position_ids(self, inputs: Mapping[str, Tensor | None]) -> Tensor | None:
        """Explicit position ids for `inputs`: input_ids[B, T] and, if given, attention_mask[B, T] and image_grid_thw.

        Returns:
            For models with multimodal RoPE [3, B, T] from the model's `get_rope_index`, since without explicit
            positions the model may reuse the offsets of an earlier image. For other causal models [B, T], counted over
            unmasked tokens. None if the model takes none (encoders).
        """
        return position_ids(self.model, inputs) if self.causal else None

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None, layers: Sequence[int], **kwargs: Any
    ) -> dict[int, Tensor]:
        """Residual stream at `layers` from one forward that stops after the deepest; no gradient, no head.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens; None: all are tokens.
            layers: 0 (embeddings) to n_layers (output of the last block, before the final norm).
            kwargs: further inputs, e.g. pixel_values and image_grid_thw from `encode_messages`.

        Returns:
            Layer to [B, T, d], on the model's device.

        Raises:
            ModelError: a layer out of range.
        """
        from sae.errors import LayerError
        from sae.hooks import hidden_states

        given = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        inputs = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in given.items()
            if value is not None
        }
        if "position_ids" not in inputs and (positions := self.position_ids(inputs)) is not None:
            inputs["position_ids"] = positions
        try:
            with torch.no_grad():
                return hidden_states(self.model, layers, **inputs)
        except LayerError as error:
            raise ModelError(f"{self.name}: {error}") from None

    def encode_messages(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """A chat with images as model inputs.

        Args:
            messages: in the format of qwen-vl-utils:
                `[{"role": "user", "content": [{"type": "image", "image": path}, {"type": "text", "text": question}]}]`.
                An image is a path, a `file://` path or a PIL image; URLs are refused.

        Returns:
            input_ids, attention_mask [1, T]; with images also pixel_values, image_grid_thw and, if the model takes
            them, mm_token_type_ids [1, T].

        Raises:
            ImagePathError: an image that is missing or cannot be read.
            ModelError: images for a model without them, videos, or a tokenizer without a chat template.
        """
        parts = image_parts(messages)
        extra: dict[str, Tensor] = {}
        counts: list[int] = []
        if parts:
            processor = image_processor(self)
            extra = image_inputs(processor, parts)
            counts = (extra["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist()
        input_ids = torch.tensor([chat_ids(self.tokenizer, messages, counts)])
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **extra}
        if parts and (kinds := modality(self.model, input_ids)) is not None:
            inputs["mm_token_type_ids"] = kinds
        return inputs


def modality(model: Any, input_ids: Tensor) -> Tensor | None:
    """mm_token_type_ids [B, T] of inputs with images: 0 text, 1 image; None if the model takes none."""
    takes = "mm_token_type_ids" in inspect.signature(inner_model(model).forward).parameters
    return _modality(model, input_ids) if takes else None


def _modality(model: Any, input_ids: Tensor) -> Tensor:
    return (input_ids == getattr(model.config, "image_token_id", -1)).int()


def inner_model(model: Any) -> Any:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def position_ids(model: Any, inputs: Mapping[str, Tensor | None]) -> Tensor | None:
    """`Backbone.position_ids` for a causal model, with adapters or without."""
    input_ids = inputs["input_ids"]
    assert input_ids is not None
    mask = inputs.get("attention_mask")
    bare = inner_model(model)
    rope_index = getattr(getattr(bare, "model", None), "get_rope_index", None)
    if rope_index is None or inputs.get("image_grid_thw") is None:
        if rope_index is None and "position_ids" not in inspect.signature(bare.forward).parameters:
            return None
        mask = torch.ones_like(input_ids) if mask is None else mask
        plain = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return plain if rope_index is None else plain.expand(3, *plain.shape)
    arguments = {"image_grid_thw": inputs.get("image_grid_thw"), "video_grid_thw": None, "attention_mask": mask}
    if "mm_token_type_ids" in inspect.signature(rope_index).parameters:
        types = inputs.get("mm_token_type_ids")
        arguments["mm_token_type_ids"] = _modality(model, input_ids) if types is None else types
    positions: Tensor = rope_index(input_ids, **arguments)[0]
    return positions
