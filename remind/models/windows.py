"""Dialogue text, with or without its images, cut into windows of tokens, and the windows as batches of model inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from remind.core.errors import ConfigError
from remind.core.progress import track
from remind.data.dialogue import Dialogue, Turn
from remind.models.backbone import Backbone
from remind.models.images import Pictures
from remind.states.pyramid import line_of, one_line


@dataclass(frozen=True)
class Window:
    """Tokens for one forward, without the special tokens of `Backbone.frame`.

    Attributes:
        ids: tokens; an image is a block of image tokens between its two marks.
        turns: number of the turn of each token.
        images: files of the images, in order.
    """

    ids: tuple[int, ...]
    turns: tuple[int, ...]
    images: tuple[str, ...] = ()


def window_size(backbone: Backbone, size: int | None) -> int:
    """Tokens of text per forward, by default 2048 (256 for encoders), so that special tokens fit beside them.

    Raises:
        ConfigError: more than the model takes.
    """
    most = backbone.max_length - sum(map(len, backbone.frame))
    if size is not None and size > most:
        raise ConfigError(f"window {size} is too long: {backbone.name} takes {most} tokens of text")
    return min(size or (2048 if backbone.causal else 256), most)


def prompt_lines(turn: Turn) -> str:
    """A turn as prompts show it: its line, then a line for each image caption."""
    return "".join(text for text, _ in _pieces(turn, images=False))


#: Tokens that are not separated, one of a text or all of an image; their turn; the image.
_Unit: TypeAlias = tuple[list[int], int, str | None]


def make_windows(
    backbone: Backbone, dialogues: Sequence[Dialogue], size: int, label: str, image_tokens: int = 0
) -> list[Window]:
    """Each session cut into windows of about equal length, at most `size` tokens. Turns are numbered over dialogues.

    Args:
        image_tokens: tokens per image at most, shown in place of its caption if its file exists, as in grounding; 0: no
            images.

    Raises:
        ConfigError: a window too small for an image, or a backbone that takes none.
        ImagePathError: an image that is missing or cannot be read.
    """
    windows: list[Window] = []
    turn_number = 0
    pictures = Pictures(backbone, image_tokens) if image_tokens else None
    for dialogue in track(dialogues, label, len(dialogues)):
        for session in dialogue.sessions:
            units: list[_Unit] = []
            for turn in session.turns:
                for text, path in _pieces(turn, pictures is not None):
                    if pictures is not None and path is not None:
                        block = pictures.block(pictures.count(path))
                        if len(block) > size:
                            raise ConfigError(f"window {size} is too small for the {len(block)} tokens of {path}")
                        units.append((block, turn_number, path))
                    units += [([token], turn_number, None) for token in backbone.tokenize(text).ids]
                turn_number += 1
            for part in _cut(units, size):
                ids = tuple(token for own, _, _ in part for token in own)
                turns = tuple(turn for own, turn, _ in part for _ in own)
                windows.append(Window(ids, turns, tuple(image for *_, image in part if image is not None)))
    return windows


def _pieces(turn: Turn, images: bool) -> list[tuple[str, str | None]]:
    """The text of `prompt_lines`, cut at the images: (text, image before it)."""
    pieces: list[tuple[str, str | None]] = [(line_of(turn) + "\n", None)]
    for image in turn.images:
        text, before = pieces[-1]
        text += f"[Image #{image.index} Caption] "
        if images and image.path is not None:
            pieces[-1:] = [(text, before), ("\n", image.path)]
        else:
            pieces[-1] = (text + (one_line(image.caption or "") or "(no caption)") + "\n", before)
    return pieces


def _cut(units: Sequence[_Unit], size: int) -> Iterator[Sequence[_Unit]]:
    """As few parts as fit, of about equal length."""
    total = sum(len(ids) for ids, *_ in units)
    if not total:
        return
    target = math.ceil(total / math.ceil(total / size))
    start = length = 0
    for place, (ids, *_) in enumerate(units):
        # a part may end early before an image
        if length and (length >= target or length + len(ids) > size):
            yield units[start:place]
            start, length = place, 0
        length += len(ids)
    yield units[start:]


def mixed(windows: Sequence[Window], per_batch: int, seed: int) -> list[Window]:
    """In random order, but sorted by length within 32 batches, for less padding."""
    order = list(windows)
    random.Random(seed).shuffle(order)
    groups = _groups(order, 32 * per_batch)
    return [window for group in groups for window in sorted(group, key=lambda w: len(w.ids))]


def _groups(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    return (windows[start : start + size] for start in range(0, len(windows), size))


def batches(
    backbone: Backbone, windows: Sequence[Window], count: int, image_tokens: int = 0
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Model inputs of `count` windows each, padded on the right, and the turn of each token [B, T] (-1: none).

    Args:
        image_tokens: as for `make_windows`.
    """
    before, after = backbone.frame
    pictures = Pictures(backbone, image_tokens) if image_tokens else None
    pad = backbone.tokenizer.pad_token_id or 0
    for group in _groups(windows, count):
        rows = [torch.tensor([*before, *window.ids, *after]) for window in group]
        numbers = [torch.tensor([*[-1] * len(before), *window.turns, *[-1] * len(after)]) for window in group]
        ids, turns = pad_sequence(rows, True, pad), pad_sequence(numbers, True, -1)
        mask = pad_sequence(list(map(torch.ones_like, rows)), True)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if images := [path for window in group for path in window.images]:
            assert pictures is not None  # only then are there images in windows
            inputs |= pictures.tensors(images)
        on_device = {name: value.to(backbone.device) for name, value in inputs.items()}
        if (positions := backbone.position_ids(on_device)) is not None:
            on_device["position_ids"] = positions
        yield on_device, turns
