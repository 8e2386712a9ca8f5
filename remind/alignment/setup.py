"""All that a run has before its first step: model, data, optimiser, and where it goes on from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from remind.alignment.base_targets import BaseTargets
from remind.alignment.cache import Cache, Crew
from remind.alignment.config import TrainConfig
from remind.alignment.data import Answers, Data, check_trainable, fit_of, load_data
from remind.alignment.decoded import decode
from remind.alignment.example import Pictured
from remind.alignment.model import check_head, check_vocabulary, checkpoint_activations, fingerprint, load, prepare
from remind.alignment.optim import make_optimizer
from remind.alignment.order import Order, padding
from remind.alignment.pictures import Pictures, check_mixture
from remind.alignment.run_folder import CACHE, DATA, RunFolder
from remind.alignment.step import AlignmentModel, Pass, plan
from remind.alignment.teachers import Ema, Live, Teachers
from remind.alignment.workers import Workers
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
        optimizer: as accelerate wraps it.
        start: the checkpoint to go on from, not yet read.
    """

    cfg: TrainConfig
    accelerator: Any
    folder: RunFolder
    data: Data
    order: Order
    total: int
    about: dict[str, Any]
    workers: Workers
    passes: tuple[Pass, ...]
    optimizer: Any
    teachers: Teachers
    start: Path | None

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer


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
    check_trainable(cfg.states)  # what cannot be used should not show only after the model is loaded
    start = folder.claim()
    accelerator.wait_for_everyone()
    if cfg.quantise is not None and sharded(accelerator):
        raise ConfigError("quantise: a model in 4 bits cannot be sharded; use configs/accelerate/ddp_2gpu.yaml")
    # FSDP shards what is on the CPU; otherwise weights go straight to their device
    backbone = load(cfg, "cpu" if sharded(accelerator) else str(accelerator.device))
    check_head(backbone.model)
    base = fingerprint(backbone.model)
    cache = Cache(cfg.data.cache or folder.path / CACHE)
    crew = Crew(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    # a full disk is no refusal: what is cached by then is used by the next attempt
    with folder.refusing(DataError, ConfigError):
        data = _load_data(cfg, backbone, accelerator.device, folder, cache, crew, base)
    with folder.refusing(RemindError):
        _check_data(cfg, data, backbone, crew, sharded(accelerator))
    lengths = tuple(example.longest for example in data.train.items)
    order = Order(len(lengths), cfg.trainer.batch_size, cfg.seed, lengths if cfg.data.group_by_length else None)
    total = cfg.trainer.max_steps or cfg.trainer.epochs * order.steps_per_epoch
    about = {**data.about, "base_model": cfg.model, "base_fingerprint": base, "steps": total}
    size = ceil(cfg.trainer.batch_size / crew.processes / cfg.trainer.gradient_accumulation)
    about["padding"] = round(padding(order, lengths, crew.processes, size), 4)

    teachers = _base_targets(cfg, backbone, accelerator.device, data, cache, crew, base)
    if isinstance(teachers, BaseTargets) and teachers.error is not None:
        about["targets_error"] = teachers.error
    module = AlignmentModel(prepare(backbone, cfg), cfg.objective)
    if cfg.trainer.gradient_checkpointing:
        checkpoint_activations(backbone.model)
    loop = cfg.trainer
    optimizer = make_optimizer(module, loop.optimizer, loop.lr, loop.weight_decay, cfg.seed)
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    workers = Workers(accelerator, wrapped, cfg.trainer.batch_size)
    if cfg.objective.teacher_weights == "ema":
        teachers = Ema(workers.model, cfg.teacher.ema_decay, sorted(cfg.objective.taught), cfg.trainer.prefix_sharing)
    return Setup(cfg, accelerator, folder, data, order, total, about, workers, passes, optimizer, teachers, start)


def _check_data(cfg: TrainConfig, data: Data, backbone: Backbone, crew: Crew, split_up: bool) -> None:
    """Whether the model can be trained on these examples with these settings. Raises ConfigError, ModelError."""
    examples = (*data.train.items, *data.held_out.items)
    if cfg.train_vision and not any(isinstance(example, Pictured) for example in data.train.items):
        raise ConfigError("train_vision: no training example has images as pixels, so nothing would reach the tower")
    pictured = [isinstance(example, Pictured) for example in examples]
    check_mixture(pictured, crew, cfg.train_vision, split_up, cfg.trainer.prefix_sharing)
    check_vocabulary(backbone.model, max(example.largest_id for example in examples))


def _base_targets(
    cfg: TrainConfig,
    backbone: Backbone,
    device: torch.device,
    data: Data,
    cache: Cache,
    crew: Crew,
    base: str,
) -> Teachers:
    """Before the first step, and before a checkpoint is read: the model is still the base model."""
    if cfg.objective.teacher_weights != "base" or not cfg.objective.taught:
        return Live()
    levels = sorted(cfg.objective.taught)
    with _at(backbone.model, device):
        module = AlignmentModel(backbone.model.eval(), cfg.objective)
        return BaseTargets(module, data.train.items, levels, cfg.teacher, base, cache, crew, cfg.lora is not None)


@contextmanager
def _at(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """The model on the device it is to be run on, and afterwards back where FSDP takes it from."""
    home = next(model.parameters()).device
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


def _decode(
    cfg: TrainConfig,
    backbone: Backbone,
    device: torch.device,
    cache: Cache,
    crew: Crew,
    base: str,
    records: Sequence[StateRecord],
) -> Mapping[str, str | None]:
    fit = fit_of(cfg.data, backbone.max_length)
    with _at(backbone.model, device):
        return decode(backbone, records, cfg.data.unlabelled, cfg.data.max_decoded, cache, crew, base, fit)


def _load_data(
    cfg: TrainConfig,
    backbone: Backbone,
    device: torch.device,
    folder: RunFolder,
    cache: Cache,
    crew: Crew,
    base: str,
) -> Data:
    trainer, config, length = cfg.trainer, cfg.data, backbone.max_length
    answers: Answers | None = None
    if config.unlabelled != "skip":
        answers = partial(_decode, cfg, backbone, device, cache, crew, base)
    watched = (trainer.eval_split, trainer.eval_limit)
    shown = Pictures(backbone, config.image_tokens, config.image_root) if config.images == "pixels" else None
    data = load_data(cfg.states, backbone.tokenizer, config, length, *watched, cache, crew, answers, shown)
    if not cfg.objective.active and not any(example.labelled for example in data.train.items):
        raise ConfigError("nothing is trained: no question has a gold answer, and no edge has gamma above 0")
    left_out = {reason: len(ids) for reason, ids in data.train.left_out().items()}
    if folder.main and left_out:
        print(f"left out of training: {left_out}; the ids are in {folder.path / DATA}", file=sys.stderr)
    return data


def _resolved(cfg: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run folder can be read from anywhere."""
    if not cfg.states or not cfg.out or not cfg.model:
        raise ConfigError("states, model and out must be given")
    local = cfg.model not in ("nano", "nano-untrained") and Path(cfg.model).is_dir()
    model = str(Path(cfg.model).resolve()) if local else cfg.model
    if cfg.data.image_root is not None:
        cfg = replace(cfg, data=replace(cfg.data, image_root=str(Path(cfg.data.image_root).expanduser().resolve())))
    return replace(cfg, states=str(Path(cfg.states).resolve()), out=str(Path(cfg.out).resolve()), model=model)
