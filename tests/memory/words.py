"""An encoder that needs no model: texts that share words are close."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import scripted
import torch
from torch import Tensor

from remind.memory.base import Services


class WordEncoder:
    """A text's vector is the sum of its words', which are random; a token is a word."""

    def __init__(self, dimension: int = 24, name: str = "words") -> None:
        self.dimension, self.name = dimension, name

    def encode(self, texts: Sequence[str]) -> Tensor:
        rows = [sum(map(self._word, text.lower().split()), np.zeros(self.dimension)) for text in texts]
        made = torch.tensor(np.array(rows).reshape(len(texts), self.dimension), dtype=torch.float32)
        return torch.nn.functional.normalize(made, dim=-1)

    encode_apart = encode

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return list(map(self.count_tokens, texts))

    def _word(self, word: str) -> np.ndarray:
        return np.random.default_rng(list(hashlib.sha256(word.encode()).digest())).normal(size=self.dimension)


def services(chat: Any = None) -> Services:
    """With that encoder, and a chat model for every stage."""
    return scripted.services(WordEncoder(), chat)  # type: ignore[arg-type]
