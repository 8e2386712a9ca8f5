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
from remind.alignment.data import Data, Order, check_mixture, check_trainable, load_data
from remind.alignment.memory import memory_plan
from remind.alignment.model import check_head, check_vocabulary, checkpoint_activations, fingerprint, load, prepare
from remind.alignment.on_policy import StudentAnswers
from remind.alignment.optim import make_optimizer
from remind.alignment.run_folder import CACHE, DATA, RunFolder
from remind.alignment.step import AlignmentModel, Pass, plan
from remind.alignment.teachers import BaseTargets, Ema, Live, Teachers
from remind.alignment.tokens import decode
from remind.core.distributed import make_accelerator, sharded
from remind.core.errors import ConfigError, DataError, RemindError
from remind.models import BUILT_IN
from remind.models.pictures import Pictures
from remind.states.parquet import StateRecord


@dataclass
class Setup:
    """The parts of a run.

    Attributes:
        total: optimiser steps in all.
        about: provenance and counts, for data.json.
        module: the `AlignmentModel` as accelerate wraps it.
        optimizer: as accelerate wraps it.
        student_answers: where the student answers for itself (`data.targets` on_policy).
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
    student_answers: StudentAnswers | None
    start: Path | None

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer


def set_up(cfg: TrainConfig) -> Setup:
    """Claim the run folder, load and tokenise, and prepare for the processes there are.

    Raises:
        ConfigError: settings that cannot work, or other settings than those the run was begun with.
        DataError: states that cannot be used.
        ModelError: a model that cannot be used.
    """
    from accelerate.utils import set_seed

    cfg = _resolved(cfg)
    objective, trainer, on_policy = cfg.objective, cfg.trainer, cfg.data.targets == "on_policy"
    passes = plan(objective, trainer.step, trainer.prefix_sharing)
    accelerator = make_accelerator(Path(cfg.out), trainer.trackers)
    folder = RunFolder(cfg, accelerator)
    set_seed(cfg.seed)
    check_trainable(cfg.states)  # before the model is loaded, which takes long
    start = folder.claim()
    accelerator.wait_for_everyone()
    if cfg.quantise is not None and sharded(accelerator):
        raise ConfigError("quantise: a model in 4 bits cannot be sharded; use configs/accelerate/ddp_2gpu.yaml")
    if on_policy and sharded(accelerator):
        raise ConfigError(
            "data.targets on_policy: a sharded model cannot answer; use DDP (configs/accelerate/ddp_2gpu.yaml)"
        )
    # FSDP shards what is on the CPU; otherwise weights go straight to their device
    backbone = load(cfg, "cpu" if sharded(accelerator) else str(accelerator.device))
    check_head(backbone.model)
    base = fingerprint(backbone.model)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    cache = Cache(cfg.data.cache or folder.path / CACHE)

    def answers(records: Sequence[StateRecord]) -> Mapping[str, str | None]:
        config = cfg.data
        with _on(accelerator.device, backbone.model):
            return decode(
                backbone, records, config.unlabelled, config.max_decoded, cache, base, config.decode_batch, ranks, shown
            )

    # a full disk does not remove the folder: what is cached by then is used by the next attempt
    with folder.refusing(DataError, ConfigError):
        shown = None
        if cfg.data.images == "pixels":
            shown = Pictures(backbone, cfg.data.image_tokens, cfg.data.image_root, "data.")
        data = load_data(
            cfg.states, backbone.tokenizer, cfg.data, backbone.max_length, trainer.eval_split, trainer.eval_limit,
            cache, ranks, answers, shown,
        )  # fmt: skip
        if not objective.active and not any(example.labelled for example in data.train.items):
            raise ConfigError("nothing is trained: no question has a gold answer, and no edge has gamma above 0")
    left_out = {reason: len(ids) for reason, ids in data.train.left_out().items()}
    if folder.main and left_out:
        print(f"left out of training: {left_out}; the ids are in {folder.path / DATA}", file=sys.stderr)
    if folder.main and data.held_out.items:
        print(f"held-out loss: {len(data.held_out)} questions of split {data.eval_split}", file=sys.stderr)
    elif folder.main:
        print(
            f"warning: no questions of split {trainer.eval_split} for a held-out loss, so that no collapse is noticed "
            "and no best checkpoint chosen; build states with such a split, or name another one as trainer.eval_split",
            file=sys.stderr,
        )
    with folder.refusing(RemindError):
        examples = (*data.train.items, *data.held_out.items)
        if cfg.train_vision and not any(example.images for example in data.train.items):
            raise ConfigError(
                "train_vision: no training example has images as pixels, so nothing would reach the tower"
            )
        pictured = [bool(example.images) for example in examples]
        check_mixture(pictured, ranks.processes, cfg.train_vision, sharded(accelerator), trainer.prefix_sharing)
        check_vocabulary(backbone.model, max(example.largest_id for example in examples))
    order = Order(len(data.train), trainer.batch_size, cfg.seed)
    total = trainer.max_steps or trainer.epochs * order.steps_per_epoch
    about = {**data.about, "base_model": cfg.model, "base_fingerprint": base, "steps": total}

    teachers: Teachers = Live()
    frozen = objective.teacher_weights == "base" and bool(objective.taught)
    if frozen and not on_policy:
        # now, while the model is still the base model
        with _on(accelerator.device, backbone.model):
            module = AlignmentModel(backbone.model.eval(), objective)
            teachers = BaseTargets(
                module, data.train.items, sorted(objective.taught), cfg.teacher, base, cache, ranks,
                frozen_head=cfg.lora is not None,
            )  # fmt: skip
    module = AlignmentModel(prepare(backbone, cfg), objective)
    if trainer.gradient_checkpointing:
        checkpoint_activations(backbone.model)
    tokens = max(len(prompt) + len(example.answer) for example in data.train.items for prompt in example.prompts)
    answer = max(len(example.answer) for example in data.train.items)
    memory = memory_plan(backbone.model, cfg, tokens, answer, ranks.processes, sharded(accelerator))
    with folder.refusing(ConfigError):
        memory.check(accelerator.device, say=folder.main)
    optimizer = make_optimizer(module, trainer.optimizer, trainer.lr, trainer.weight_decay, cfg.seed)
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    if objective.teacher_weights == "ema" or (frozen and on_policy):
        model = accelerator.unwrap_model(wrapped).model
        # targets at answers that are not known yet cannot be cached: an average that never moves gives them
        decay = 1.0 if frozen else cfg.teacher.ema_decay
        teachers = Ema(model, decay, sorted(objective.taught), trainer.prefix_sharing)
    answers_of = StudentAnswers(backbone, cfg, order, total, data.train.items, accelerator) if on_policy else None
    return Setup(
        cfg, accelerator, folder, data, order, total, about, wrapped, passes, optimizer, teachers, answers_of, start
    )


@contextmanager
def _on(device: torch.device, model: Any) -> Iterator[None]:
    """The model on the device it is to be run on, and afterwards back where FSDP takes it from."""
    home = next(model.parameters()).device
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


def _resolved(cfg: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run folder can be read from anywhere."""
    if not cfg.states or not cfg.out or not cfg.model:
        raise ConfigError("states, model and out must be given")
    local = cfg.model not in BUILT_IN and Path(cfg.model).exists()
    model = str(Path(cfg.model).resolve()) if local else cfg.model
    if cfg.data.image_root is not None:
        cfg = replace(cfg, data=replace(cfg.data, image_root=str(Path(cfg.data.image_root).expanduser().resolve())))
    return replace(cfg, states=str(Path(cfg.states).resolve()), out=str(Path(cfg.out).resolve()), model=model)
