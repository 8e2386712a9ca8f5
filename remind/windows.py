"""Dialogue text cut into windows of tokens, and the windows as batches of model inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remind.dialogue import Dialogue, Turn
from remind.errors import ConfigError
from remind.progress import track
from remind.pyramid import line_of, one_line

if TYPE_CHECKING:
    from remind.backbone import Backbone


@dataclass(frozen=True)
class Window:
    """Text for one forward, without special tokens. `turns[i]` is the number of the turn that token i belongs to."""

    ids: tuple[int, ...]
    turns: tuple[int, ...]


def window_size(backbone: Backbone, asked: int | None) -> int:
    """Tokens of text per forward, so that the tokenizer's own special tokens fit beside them."""
    most = backbone.max_length - sum(map(len, backbone.frame))
    size = asked if asked is not None else (2048 if backbone.causal else 256)
    if asked is not None and asked > most:
        raise ConfigError(f"window {asked} is too long: {backbone.name} takes {most} tokens of text")
    return min(size, most)


def prompt_lines(turn: Turn) -> str:
    """A turn as prompts show it: its line, then a line for each image caption."""
    lines = [line_of(turn)]
    lines += [f"[Image #{image.index} Caption] {one_line(image.caption)}" for image in turn.images if image.caption]
    return "\n".join(lines) + "\n"


def make_windows(backbone: Backbone, dialogues: Sequence[Dialogue], size: int, label: str) -> list[Window]:
    """Each session cut into windows of about equal length, at most `size` tokens; turns are numbered through."""
    windows: list[Window] = []
    turn_number = 0
    for dialogue in track(dialogues, label, len(dialogues)):
        for session in dialogue.sessions:
            ids: list[int] = []
            turns: list[int] = []
            for turn in session.turns:
                piece = backbone.tokenize(prompt_lines(turn)).ids
                ids += piece
                turns += [turn_number] * len(piece)
                turn_number += 1
            parts = math.ceil(len(ids) / size)
            bounds = [len(ids) * part // parts for part in range(parts + 1)] if parts else []
            windows += [Window(tuple(ids[start:end]), tuple(turns[start:end])) for start, end in pairwise(bounds)]
    return windows


def mixed(windows: Sequence[Window], per_batch: int, seed: int) -> list[Window]:
    """In random order, but like lengths together within a stretch of 32 batches: less padding."""
    order = list(windows)
    random.Random(seed).shuffle(order)
    stretch = 32 * per_batch
    return [window for part in _groups(order, stretch) for window in sorted(part, key=lambda w: len(w.ids))]


def _groups(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    return (windows[start : start + size] for start in range(0, len(windows), size))


def batches(backbone: Backbone, windows: Sequence[Window], count: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Model inputs, padded on the right, and the turn of each token [B, T] (-1 where it has none)."""
    before, after = backbone.frame
    pad = backbone.tokenizer.pad_token_id or 0
    for group in _groups(windows, count):
        longest = max(len(window.ids) for window in group)
        length = longest + len(before) + len(after)
        ids = torch.full((len(group), length), pad)
        mask = torch.zeros_like(ids)
        turns = torch.full_like(ids, -1)
        for row, window in enumerate(group):
            whole = [*before, *window.ids, *after]
            ids[row, : len(whole)] = torch.tensor(whole)
            mask[row, : len(whole)] = 1
            turns[row, len(before) : len(before) + len(window.ids)] = torch.tensor(window.turns)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        on_device = {name: value.to(backbone.device) for name, value in inputs.items()}
        if (positions := backbone.position_ids(on_device)) is not None:
            on_device["position_ids"] = positions
        yield on_device, turns
