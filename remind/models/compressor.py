"""Prompt compression by a token classifier (LLMLingua-2, Pan et al., 2024): the words that say least are left out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch

from remind.core.errors import ModelError
from remind.core.progress import without_loading_bars

#: The class of tokens that are kept.
_KEPT = 1


class Compressor:
    """Leaves out words of a text.

    Args:
        folder: of a token classifier with two classes, such as LLMLingua-2, and a fast tokenizer; loaded at first use.
        rate: share of a text's words that is kept, rounded up.

    Raises:
        ModelError: at first use, where the folder holds no such model.
    """

    def __init__(self, folder: str | Path, rate: float) -> None:
        self.folder, self.rate = Path(folder), rate

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        if not (self.folder / "config.json").is_file():
            raise ModelError(f"{self.folder}: not a model folder; give that of a token classifier such as LLMLingua-2")
        try:
            with without_loading_bars():
                tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
                model = AutoModelForTokenClassification.from_pretrained(
                    self.folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
                )
        except Exception as error:  # the loaders raise OSError, ValueError, KeyError, safetensors errors, ...
            raise ModelError(f"{self.folder}: the compressor cannot be loaded: {error}") from None
        if model.config.num_labels != _KEPT + 1 or not tokenizer.is_fast:
            raise ModelError(f"{self.folder}: not a token classifier of two classes with a fast tokenizer")
        return tokenizer, model.eval()

    @torch.no_grad()
    def scores(self, words: list[str]) -> list[float]:
        """How likely each word is to be kept: the mean over its tokens."""
        tokenizer, model = self._loaded
        size = min(tokenizer.model_max_length, model.config.max_position_embeddings)
        options: Mapping[str, Any] = {"truncation": True, "max_length": size, "return_overflowing_tokens": True}
        # one piece at a time: what is kept must not depend on padding
        pieces = tokenizer(words, is_split_into_words=True, **options)
        sums, counts = [0.0] * len(words), [0] * len(words)
        for number in range(len(pieces["input_ids"])):
            ids = torch.tensor([pieces["input_ids"][number]])
            kept = model(input_ids=ids).logits[0].softmax(-1)[:, _KEPT].tolist()
            for word, score in zip(pieces.word_ids(number), kept, strict=True):
                if word is not None:
                    sums[word] += score
                    counts[word] += 1
        return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]

    def compress(self, text: str) -> str:
        """The likeliest words of a text in their order, joined by spaces; of equal ones the earlier."""
        words = text.split()
        if len(words) < 2 or self.rate == 1:
            return text
        scores = self.scores(words)
        best = sorted(range(len(words)), key=lambda place: -scores[place])[: ceil(self.rate * len(words))]
        return " ".join(words[place] for place in sorted(best))
