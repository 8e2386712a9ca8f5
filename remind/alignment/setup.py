"""All that a run has before its first step: model, data, optimiser, teachers, and the checkpoint to resume from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remind.alignment.cache import Cache, Ranks
from remind.alignment.config import TrainConfig
from remind.alignment.data import Data, Order, check_trainable, fit_of, load_data
from remind.alignment.model import check_head, check_vocabulary, checkpoint_activations, fingerprint, load, prepare
from remind.alignment.optim import make_optimizer
from remind.alignment.pictures import Pictures, check_mixture
from remind.alignment.run_folder import CACHE, DATA, RunFolder
from remind.alignment.step import AlignmentModel, Pass, plan
from remind.alignment.teachers import BaseTargets, Ema, Live, Teachers
from remind.alignment.tokens import decode
from remind.core.distributed import make_accelerator, sharded
from remind.core.errors import ConfigError, DataError, RemindError
from remind.models.backbone import Backbone
from remind.states.parquet import StateRecord


@dataclass
class Setup:
    """The parts of a run.

    Attributes:
        total: optimiser steps in all.
        about: provenance and counts, for data.json.
        module: the `AlignmentModel` as accelerate wraps it.
        optimizer: as accelerate wraps it.
        start: the checkpoint to resume from, not yet read.
    """

    cfg: TrainConfig
    accelerator: Any
    folder: RunFolder
    data: Data
    order: Order
    total: int
    about: dict[str, Any]
    module: nn.Module
    passes: tuple[Pass, ...]
    optimizer: Any
    teachers: Teachers
    start: Path | None

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer


@dataclass
class _Base:
    """The base model and what is computed with it before training."""

    cfg: TrainConfig
    backbone: Backbone
    fingerprint: str
    device: torch.device
    cache: Cache
    ranks: Ranks

    def data(self) -> Data:
        """Examples, those without a gold answer with one that the base model decodes."""
        trainer, config, length = self.cfg.trainer, self.cfg.data, self.backbone.max_length
        shown = Pictures(self.backbone, config.image_tokens, config.image_root) if config.images == "pixels" else None
        data = load_data(
            self.cfg.states, self.backbone.tokenizer, config, length, trainer.eval_split, trainer.eval_limit,
            self.cache, self.ranks, self._answers, shown,
        )  # fmt: skip
        if not self.cfg.objective.active and not any(example.labelled for example in data.train.items):
            raise ConfigError("nothing is trained: no question has a gold answer, and no edge has gamma above 0")
        return data

    def _answers(self, records: Sequence[StateRecord]) -> Mapping[str, str | None]:
        config = self.cfg.data
        fit = fit_of(config, self.backbone.max_length)
        with self._on_device():
            return decode(
                self.backbone, records, config.unlabelled, config.max_decoded, self.cache, self.fingerprint, fit,
                ranks=self.ranks,
            )  # fmt: skip

    def targets(self, data: Data) -> Teachers:
        """Targets of teachers with base weights; to be called while the model is still the base model."""
        objective = self.cfg.objective
        if objective.teacher_weights != "base" or not objective.taught:
            return Live()
        with self._on_device():
            module = AlignmentModel(self.backbone.model.eval(), objective)
            frozen_head = self.cfg.lora is not None
            return BaseTargets(
                module, data.train.items, sorted(objective.taught), self.cfg.teacher, self.fingerprint, self.cache,
                self.ranks, frozen_head,
            )  # fmt: skip

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The model on the device it is to be run on, and afterwards back where FSDP takes it from."""
        model = self.backbone.model
        home = next(model.parameters()).device
        model.to(self.device)
        try:
            yield
        finally:
            model.to(home)


def set_up(cfg: TrainConfig) -> Setup:
    """Claim the run folder, load and tokenise, and prepare for the processes there are.

    Raises:
        ConfigError: settings that cannot work, a run folder in use, or other settings than those it was begun with.
        DataError: states that cannot be used.
        ModelError: a model that cannot be used.
    """
    from accelerate.utils import set_seed

    cfg = _resolved(cfg)
    passes = plan(cfg.objective, cfg.trainer.step, cfg.trainer.prefix_sharing)
    accelerator = make_accelerator(Path(cfg.out))
    folder = RunFolder(cfg, accelerator.is_main_process)
    set_seed(cfg.seed)
    check_trainable(cfg.states)  # before the model is loaded, which takes long
    start = folder.claim()
    accelerator.wait_for_everyone()
    if cfg.quantise is not None and sharded(accelerator):
        raise ConfigError("quantise: a model in 4 bits cannot be sharded; use configs/accelerate/ddp_2gpu.yaml")
    # FSDP shards what is on the CPU; otherwise weights go straight to their device
    backbone = load(cfg, "cpu" if sharded(accelerator) else str(accelerator.device))
    check_head(backbone.model)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    cache = Cache(cfg.data.cache or folder.path / CACHE)
    base = _Base(cfg, backbone, fingerprint(backbone.model), accelerator.device, cache, ranks)
    # a full disk does not remove the folder: what is cached by then is used by the next attempt
    with folder.refusing(DataError, ConfigError):
        data = base.data()
    left_out = {reason: len(ids) for reason, ids in data.train.left_out().items()}
    if folder.main and left_out:
        print(f"left out of training: {left_out}; the ids are in {folder.path / DATA}", file=sys.stderr)
    with folder.refusing(RemindError):
        _check_data(cfg, data, backbone, ranks.processes, sharded(accelerator))
    order = Order(len(data.train), cfg.trainer.batch_size, cfg.seed)
    total = cfg.trainer.max_steps or cfg.trainer.epochs * order.steps_per_epoch
    about = {**data.about, "base_model": cfg.model, "base_fingerprint": base.fingerprint, "steps": total}

    teachers = base.targets(data)
    module = AlignmentModel(prepare(backbone, cfg), cfg.objective)
    if cfg.trainer.gradient_checkpointing:
        checkpoint_activations(backbone.model)
    trainer = cfg.trainer
    optimizer = make_optimizer(module, trainer.optimizer, trainer.lr, trainer.weight_decay, cfg.seed)
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    if cfg.objective.teacher_weights == "ema":
        model = accelerator.unwrap_model(wrapped).model
        teachers = Ema(model, cfg.teacher.ema_decay, sorted(cfg.objective.taught), trainer.prefix_sharing)
    return Setup(cfg, accelerator, folder, data, order, total, about, wrapped, passes, optimizer, teachers, start)


def _check_data(cfg: TrainConfig, data: Data, backbone: Backbone, processes: int, split_up: bool) -> None:
    """Whether the model can be trained on these examples with these settings. Raises ConfigError, ModelError."""
    examples = (*data.train.items, *data.held_out.items)
    if cfg.train_vision and not any(example.images for example in data.train.items):
        raise ConfigError("train_vision: no training example has images as pixels, so nothing would reach the tower")
    pictured = [bool(example.images) for example in examples]
    check_mixture(pictured, processes, cfg.train_vision, split_up, cfg.trainer.prefix_sharing)
    check_vocabulary(backbone.model, max(example.largest_id for example in examples))


def _resolved(cfg: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run folder can be read from anywhere."""
    if not cfg.states or not cfg.out or not cfg.model:
        raise ConfigError("states, model and out must be given")
    local = cfg.model not in ("nano", "nano-untrained") and Path(cfg.model).is_dir()
    model = str(Path(cfg.model).resolve()) if local else cfg.model
    if cfg.data.image_root is not None:
        cfg = replace(cfg, data=replace(cfg.data, image_root=str(Path(cfg.data.image_root).expanduser().resolve())))
    return replace(cfg, states=str(Path(cfg.states).resolve()), out=str(Path(cfg.out).resolve()), model=model)
