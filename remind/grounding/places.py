"""Where each token of a rendered prompt stands: in which turn, and in which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from remind.data.dialogue import Turn
from remind.states.pyramid import Rendered, Span, one_line


class Part(IntEnum):
    """What a token belongs to. OTHER: instructions, headers, caption labels, line ends, placeholders."""

    OTHER = 0
    SPEAKER = 1
    TEXT = 2
    CAPTION = 3
    REASONING = 4
    ANCHOR = 5


def first_character(text: str, span: Span) -> int:
    """Position of the span's first character that is not white space; its start if there is none."""
    start, end = span
    piece = text[start:end]
    rest = len(piece.lstrip())
    return start + len(piece) - rest if rest else start


def token_places(rendered: Rendered, turns: Sequence[Turn], offsets: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Turn and part of tokens by their character offsets; a token stands where its first non-space character does.

    A caption that only says that there is none is OTHER: it describes nothing.

    Args:
        rendered: the prompt. turns: its turns, in order.
        offsets: [T] character spans in `rendered.text`.

    Returns:
        Index into `turns`, -1 outside of them, int64 [T]; `Part`, int64 [T].
    """
    size = len(rendered.text) + 1
    turn_at = np.full(size, -1, dtype=np.int64)
    part_at = np.full(size, Part.OTHER, dtype=np.int64)
    for index, (span, turn) in enumerate(zip(rendered.turns, turns, strict=True)):
        turn_at[span.start : span.end] = index
        part_at[slice(*span.speaker)] = Part.SPEAKER
        part_at[slice(*span.text)] = Part.TEXT
        for caption, image in zip(span.captions, turn.images, strict=True):
            if one_line(image.caption or ""):
                part_at[slice(*caption)] = Part.CAPTION
    for part, spans in ((Part.REASONING, rendered.reasoning), (Part.ANCHOR, rendered.anchors)):
        for strategy_span in spans:
            part_at[slice(*strategy_span)] = part
    first = np.fromiter((first_character(rendered.text, span) for span in offsets), np.int64, count=len(offsets))
    return torch.from_numpy(turn_at[first]), torch.from_numpy(part_at[first])
