"""The nano backbone: Qwen3-VL in miniature, and a byte-level BPE tokenizer of our own that knows the world's words.

Everything structural is there (grouped-query attention, query and key norms, interleaved mRoPE, DeepStack, tied head,
chat template, vision placeholders), so code that runs on it runs on the real checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.files import atomic_folder, write_text
from remind.core.progress import without_loading_bars
from remind.testbed import vocabulary

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
#: Bytes and what the byte-level BPE merges of them, at most.
_PIECES = 3065
MAX_LENGTH = 32768
#: Where words, numbers, punctuation and line ends part before merging, as in Qwen's tokenizers: one digit, one token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FOLDER = files("remind.models") / "nano"


def train_tokenizer(texts: list[str], words: Sequence[str] = ()) -> str:
    """Train the byte-level BPE on `texts`; equal arguments give equal bytes.

    Args:
        words: strings that become one token each wherever they stand (`vocabulary.wordings`), so that a prompt of the
            synthetic world is about a hundred tokens long. All other text is bytes and merges.

    Returns:
        The content of a `tokenizer.json` with at most `VOCAB_SIZE` tokens, the special ones last. No normalisation, so
        that decoding gives back any text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_PIECES,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if words:
        content = json.loads(tokenizer.to_str())
        known = content["model"]["vocab"]
        for word in (*words, *vocabulary.INNER):
            known.setdefault(to_bytes.pre_tokenize_str(word)[0][0], len(known))
        # a piece that is a token as it stands is not put together from merges
        content["model"]["ignore_merges"] = True
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": f"{vocabulary.pattern(words)}|{_SPLIT}"}
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer.to_str(pretty=False)


def training_texts() -> list[str]:
    """What the shipped tokenizer is trained on: instructions in English, and every line of the bundled dialogues."""
    from remind.data.sample import texts

    return [(_FOLDER / "instructions.txt").read_text(encoding="utf-8"), *texts()]


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
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "mrope_section": [head_dim // 2 - 2 * side, side, side],
            "mrope_interleaved": True,
        },
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
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
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


def write_tokenizer(path: str | Path) -> Path:
    """Train the tokenizer anew and write it to `path`."""
    write_text(path, train_tokenizer(training_texts(), vocabulary.wordings()) + "\n")
    return Path(path)


if __name__ == "__main__":
    print(write_tokenizer(Path(__file__).parent / "nano" / "tokenizer.json"))
