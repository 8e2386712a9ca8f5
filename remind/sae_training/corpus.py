"""Dialogues to train on, and the token batches a backbone makes of them."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remind.core.errors import DataError
from remind.core.progress import track
from remind.data.dialogue import Dialogue
from remind.data.readers import read
from remind.models.windows import Window, batches
from remind.sae_training.config import TrainSAEConfig
from sae.harvest import HarvestStats, TokenBatch, harvest

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def read_dialogues(paths: Sequence[Path], cfg: TrainSAEConfig) -> list[Dialogue]:
    """Dialogues of all paths in a random order fixed by the seed, cut after `cfg.limit` turns in all."""
    dialogues = [
        (f"{number}:{dialogue.id}", dialogue)
        for number, path in enumerate(paths)
        for dialogue in read(path, cfg.format).dialogues
    ]
    dialogues.sort(key=lambda item: hashlib.sha256(f"{cfg.trainer.seed}:{item[0]}".encode()).digest())
    chosen, turns = [], 0
    for _, dialogue in dialogues:
        if cfg.limit is not None and turns >= cfg.limit:
            break
        chosen.append(dialogue)
        turns += len(dialogue.turns)
    if not chosen:
        raise DataError("no dialogues to train on", paths[0])
    return chosen


def split_dialogues(dialogues: list[Dialogue], share: float, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out). Whole dialogues; at least one is held out if there are two and share > 0."""
    order = list(range(len(dialogues)))
    random.Random(seed).shuffle(order)
    count = min(math.ceil(share * len(dialogues)), len(dialogues) - 1)
    aside = set(order[:count])
    return (
        [d for number, d in enumerate(dialogues) if number not in aside],
        [d for number, d in enumerate(dialogues) if number in aside],
    )


def data_paths(data: str | Sequence[str]) -> list[Path]:
    """Files and folders; the bundled small talk where none are given."""
    if data:
        return [Path(data)] if isinstance(data, str) else [Path(path) for path in data]
    from remind.data.sample import corpus_path

    return [Path(corpus_path())]


def files_in(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Every file of the paths, under a name that does not depend on where they lie."""
    for path in paths:
        if path.is_dir():
            yield from ((str(f.relative_to(path.parent)), f) for f in sorted(path.rglob("*")) if f.is_file())
        else:
            yield path.name, path


def part_of(windows: Sequence[Window], per_batch: int, rank: int, count: int) -> list[Window]:
    """The windows of one process: whole batches, every `count`-th from its own on."""
    starts = range(rank * per_batch, len(windows), count * per_batch)
    return [window for start in starts for window in windows[start : start + per_batch]]


class Harvester:
    """Token batches of windows from a batch number on: a source for `sae.buffer` and `sae.cache`.

    `stats` counts each batch once, however often it is harvested, and goes into checkpoints.
    """

    def __init__(
        self,
        cfg: TrainSAEConfig,
        backbone: Backbone,
        layers: Sequence[int],
        windows: Sequence[Window],
        label: str | None = None,
    ) -> None:
        self.cfg, self.backbone, self.layers, self.windows, self.label = cfg, backbone, layers, windows, label
        self.stats = HarvestStats()
        #: turn numbers [B, T] of the batch given last
        self.turns: Tensor | None = None

    def __call__(self, start: int = 0) -> Iterator[TokenBatch]:
        yield from harvest(
            self.backbone.model,
            self._inputs(start),
            self.layers,
            special_ids=self.backbone.tokenizer.all_special_ids,
            sink_factor=self.cfg.sink_factor or None,
            skip_nonfinite=self.cfg.trainer.skip_nonfinite,
            stats=self.stats,
            start=start,
        )

    def inputs(self) -> Iterator[dict[str, Any]]:
        """The model inputs alone."""
        return self._inputs(0)

    def _inputs(self, start: int) -> Iterator[dict[str, Any]]:
        per_batch = self.cfg.windows_per_batch
        windows = self.windows[start * per_batch :]
        made = batches(self.backbone, windows, per_batch, self.cfg.image_tokens)
        if self.label is not None:
            made = track(made, self.label, math.ceil(len(windows) / per_batch))
        for inputs, self.turns in made:
            yield inputs

    def state_dict(self) -> dict[str, int]:
        return asdict(self.stats)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stats = HarvestStats(**state)
