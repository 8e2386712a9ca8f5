"""The nano backbone: Qwen3-VL in miniature, with a byte-level BPE tokenizer that knows the synthetic world's words.

Everything structural is there (grouped-query attention, query and key norms, interleaved mRoPE, DeepStack, tied head,
chat template, vision placeholders), so code that runs on it runs on the real checkpoints.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
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
#: Rows of the embedding: bytes, merges, words of the world and special tokens. A multiple of 64.
VOCAB_SIZE = 3840
MAX_LENGTH = 32768
_FOLDER = files("remind.models") / "nano"


def nano_folder() -> Path:
    """The shipped checkpoint: a plain Qwen3-VL folder, pre-trained by `experiments.pretrain`; see provenance.json."""
    return Path(str(_FOLDER))


def nano_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer with its chat template; any text survives encoding and decoding."""
    from transformers import PreTrainedTokenizerFast

    with as_file(_FOLDER / "tokenizer.json") as path:
        return PreTrainedTokenizerFast(
            tokenizer_file=str(path),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens=["<|im_start|>", *SPECIAL_TOKENS[3:]],
            chat_template=(_FOLDER / "chat_template.jinja").read_text(encoding="utf-8").rstrip("\n"),
            model_max_length=MAX_LENGTH,
            clean_up_tokenization_spaces=False,
        )


@cache
def _special_ids() -> dict[str, int]:
    tokenizer = nano_tokenizer()
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}


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

    ids = _special_ids()
    head_dim = hidden_size // heads
    # mRoPE divides the head_dim/2 frequencies among time, height and width; Qwen3-VL has 24 + 20 + 20 of 64
    side = head_dim // 2 * 20 // 64
    sections = [head_dim // 2 - 2 * side, side, side]
    rope = {"rope_type": "default", "rope_theta": 100_000.0, "mrope_section": sections, "mrope_interleaved": True}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 3,
        "hidden_size": vision_size,
        "intermediate_size": 2 * vision_size,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


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
    ids = _special_ids()
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[end, pad], pad_token_id=pad)
    return model.eval()


def nano_image_processor() -> Qwen2VLImageProcessorPil:
    """Image processor of the nano model; needs no torchvision. An image becomes 4 to 64 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def save_nano(folder: str | Path, seed: int = 0, **sizes: Any) -> Path:
    """Write model, tokenizer and image processor as a plain Hugging Face folder; an existing one is replaced."""
    model, tokenizer = nano_model(seed, **sizes), nano_tokenizer()
    with atomic_folder(folder) as temporary, without_loading_bars():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        nano_image_processor().save_pretrained(temporary)
    return Path(folder)
