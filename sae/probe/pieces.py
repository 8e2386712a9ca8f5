"""Decoding of token ids to text with the span of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Decoders write this for bytes that are not a whole character.
_BROKEN = "\ufffd"
#: Tokens one character (or a few that share tokens) may be spread over.
_MOST = 8


class Pieces:
    """Decodes ids into a text and the span of each token in it; without a tokenizer, unknown ids become numbers."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        # text of an id at the start of a text and after another token (spaces differ)
        self._texts: dict[int, tuple[str, str]] = {}
        self._before: tuple[list[int], str] | None = None

    def join(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of `ids`, and start and end of each token in it. Tokens that share a character share its span."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        at, length = 0, 0
        while at < len(ids):
            piece = self._piece(ids[at])[at > 0]
            stop = at + 1
            if _BROKEN in piece:
                stop, piece = self._character(ids, at, piece)
            parts.append(piece)
            spans += [(length, length + len(piece))] * (stop - at)
            at, length = stop, length + len(piece)
        return "".join(parts), spans

    def _piece(self, token: int) -> tuple[str, str]:
        if token not in self._texts:
            if self.tokenizer is None:
                return str(token), f" {token}"
            if self._before is None:
                before = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
                self._before = before, self._decode(before)
            before, head = self._before
            first, both = self._decode([token]), self._decode([*before, token])
            self._texts[token] = (first, both[len(head) :] if both.startswith(head) else first)
        return self._texts[token]

    def _character(self, ids: Sequence[int], at: int, alone: str) -> tuple[int, str]:
        """End and text of the shortest run of tokens from `at` that decodes to whole characters, else of `at` alone."""
        for stop in range(at + 2, min(at + _MOST, len(ids)) + 1):
            text = self._decode(list(ids[at:stop]))
            if _BROKEN not in text:
                return stop, text
        return at + 1, alone

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
