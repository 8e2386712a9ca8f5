"""The nano backbone: Qwen3-VL in miniature, with a byte-level BPE tokenizer that knows the synthetic world's words.

Everything structural is there (grouped-query attention, query and key norms, interleaved mRoPE, DeepStack, tied head,
chat template, vision placeholders), so code that runs on it runs on the real checkpoints.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.files import atomic_folder
from remind.core.progress import without_loading_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def nano_folder() -> Path:
    """The shipped checkpoint: a plain Qwen3-VL folder, pre-trained by `experiments.pretrain`; see provenance.json."""
    return Path(str(files("remind.models") / "nano"))


def nano_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer with its chat template; any text survives encoding and decoding."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(nano_folder())


def nano_config(
    hidden_size: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2, vision_size: int = 32
) -> Qwen3VLConfig:
    """A Qwen3-VL configuration of that size, wired to `nano_tokenizer`.

    Args:
        hidden_size: d of the residual stream; a multiple of 4 x heads.
        layers: decoder blocks; at least 2, since DeepStack adds visual features after the first two.
        heads, kv_heads: query heads and key/value heads; heads is a multiple of kv_heads.
        vision_size: width of the vision tower (3 blocks, patches of 16 pixels, 2 x 2 merged into one token).
    """
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig.from_pretrained(nano_folder())
    head_dim = hidden_size // heads
    # mRoPE divides the head_dim/2 frequencies among time, height and width; Qwen3-VL has 24 + 20 + 20 of 64
    side = head_dim // 2 * 20 // 64
    sizes = {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config.text_config.update(sizes)
    config.text_config.rope_parameters["mrope_section"] = [head_dim // 2 - 2 * side, side, side]
    vision = {"hidden_size": vision_size, "intermediate_size": 2 * vision_size, "out_hidden_size": hidden_size}
    config.vision_config.update(vision)
    return config


def nano_model(seed: int = 0, **sizes: Any) -> Qwen3VLForConditionalGeneration:
    """The model with random float32 weights that depend on the seed alone; in eval mode, on the CPU.

    The caller's random state is left as it was. `sizes` go to `nano_config`.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    config = nano_config(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig.from_pretrained(nano_folder())
    return model.eval()


def nano_image_processor() -> Qwen2VLImageProcessorPil:
    """Image processor of the nano model; needs no torchvision. An image becomes 4 to 64 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(nano_folder())


def save_nano(folder: str | Path, seed: int = 0, **sizes: Any) -> Path:
    """Write model, tokenizer and image processor as a plain Hugging Face folder; an existing one is replaced."""
    model, tokenizer = nano_model(seed, **sizes), nano_tokenizer()
    with atomic_folder(folder) as temporary, without_loading_bars():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        nano_image_processor().save_pretrained(temporary)
    return Path(folder)
