"""An encoder and a chat model of a few lines, for tests of memory systems."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from remind.llm.request import ChatModel, Reply, Request
from remind.memory.base import Services
from remind.text.words import stems


class WordEncoder:
    """Unit vectors [n, 128] of hashed stems; a token is a word."""

    name, dimension = "words", 128

    def encode(self, texts: Sequence[str]) -> Tensor:
        vectors = torch.zeros(len(texts), self.dimension)
        for row, text in zip(vectors, texts, strict=True):
            for stem in stems(text) or [""]:
                row[zlib.crc32(stem.encode()) % self.dimension] += 1.0
        return torch.nn.functional.normalize(vectors)

    encode_apart = encode

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return list(map(self.count_tokens, texts))


class Chat:
    """Replies by a function; keeps what it was asked."""

    name = "scripted"

    def __init__(self, reply: Callable[[Request], Reply]) -> None:
        self.reply, self.asked = reply, list[Request]()

    def complete(self, requests: Sequence[Request], on_reply: Any = None) -> list[Reply]:
        self.asked += requests
        return [self.reply(request) for request in requests]


def services(chat: ChatModel | None = None) -> Services:
    return Services(cast(Any, WordEncoder()), None if chat is None else lambda system, dialogue, stage: chat)
