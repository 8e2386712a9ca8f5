"""The training run: setup, fit, evaluate, save. On one process or under `accelerate launch`, with equal results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import ceil, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment import checkpoint
from remind.alignment.config import (
    CONFIG,
    LoraConfig,
    TrainConfig,
    TrainerConfig,
    as_dict,
    differences,
    flatten,
    read_config,
    write_config,
)
from remind.alignment.data import DataConfig, Examples, Order, load_data, share
from remind.alignment.losses import Edge, Objective
from remind.alignment.metrics import MetricsLog, read_metrics, summary
from remind.alignment.model import check_head, checkpoint_activations, fingerprint, load, trainable
from remind.alignment.optim import adamw, learning_rate
from remind.alignment.step import AlignmentModel, Pass, collate, plan, run
from remind.errors import ConfigError, ModelError
from remind.io import write_json
from remind.launch import make_accelerator, sharded
from remind.progress import Counter
from remind.states import read_manifest

__all__ = [
    "DataConfig",
    "Edge",
    "LoraConfig",
    "Objective",
    "TrainConfig",
    "Trainer",
    "TrainerConfig",
    "read_metrics",
    "train",
]

DATA = "data.json"
FAILURE = "failure.json"
BEST = "best.json"


def train(cfg: TrainConfig) -> Path:
    """Train, or go on training, and save; prints where the result is.

    Returns:
        The run folder: config.yaml, data.json, metrics.jsonl, checkpoints/ and, with a dev split, best.json.

    Raises:
        ConfigError: the run folder is in use, or a resumed run differs from the one it goes on with.
        DataError: states that cannot be used.
        ModelError: a model or checkpoint that cannot be used; or a loss that is not finite, after the state before it
            and the questions it came from have been saved.
    """
    trainer = Trainer(cfg)
    trainer.fit()
    trainer.finish()
    return trainer.out


class Trainer:
    """One run. `step` counts finished optimiser steps; everything a resume needs follows from it and the weights."""

    def __init__(self, cfg: TrainConfig) -> None:
        from accelerate.utils import set_seed

        self.cfg = cfg = _resolved(cfg)
        self.out = Path(cfg.out)
        self.accelerator = make_accelerator(self.out, cfg.trainer.trackers)
        self.main = self.accelerator.is_main_process
        set_seed(cfg.seed)
        self.step = 0
        self.best: dict[str, float] | None = None
        self.log = MetricsLog(self.out)
        self._saved: int | None = None
        read_manifest(cfg.states)  # a wrong path should not show only after the model is loaded
        start = self._claim_folder()
        self._load_model()
        self._load_data()
        self._prepare()
        if start is not None:
            self._resume(start)
        if self.main:
            write_config(self.out, cfg)
            write_json(self.out / DATA, self.about)
            self.log.cut(self.step)
        if cfg.trainer.trackers:
            scalars = {key: str(value) for key, value in flatten(as_dict(cfg)).items()}
            self.accelerator.init_trackers("remind", config=scalars)

    # setup

    def _claim_folder(self) -> Path | None:
        """The checkpoint to go on from, if any. Every process looks before any of them writes."""
        used = (self.out / CONFIG).exists()
        start: Path | None = None
        if used and not self.cfg.resume:
            raise ConfigError(f"{self.out} holds a run already; choose another out, or set resume to go on with it")
        if used:
            if odd := differences(read_config(self.out), self.cfg):
                raise ConfigError(f"{self.out} was run with other settings ({', '.join(odd)}); a resume must keep them")
            start = checkpoint.newest(self.out, say=self.main)
        self.accelerator.wait_for_everyone()
        return start

    def _load_model(self) -> None:
        # FSDP shards what is on the CPU; otherwise weights go straight to their device
        device = "cpu" if sharded(self.accelerator) else str(self.accelerator.device)
        self.backbone = load(self.cfg, device)
        check_head(self.backbone.model)
        self.base = fingerprint(self.backbone.model)

    def _load_data(self) -> None:
        cfg, trainer = self.cfg, self.cfg.trainer
        self.data = load_data(
            cfg.states,
            self.backbone.tokenizer,
            cfg.data,
            self.backbone.max_length,
            trainer.eval_split,
            trainer.eval_limit,
        )
        self.order = Order(len(self.data.train), trainer.batch_size, cfg.seed)
        self.total = trainer.max_steps or trainer.epochs * self.order.steps_per_epoch
        self.about = {**self.data.about, "base_model": cfg.model, "base_fingerprint": self.base, "steps": self.total}
        left_out = {reason: len(ids) for reason, ids in self.data.train.left_out().items()}
        if self.main and left_out:
            print(f"left out of training: {left_out}; the ids are in {self.out / DATA}", file=sys.stderr)

    def _prepare(self) -> None:
        trainer = self.cfg.trainer
        self.passes = plan(self.cfg.objective, trainer.step)
        module = AlignmentModel(trainable(self.backbone.model, self.cfg.lora), self.cfg.objective)
        if trainer.gradient_checkpointing:
            checkpoint_activations(self.backbone.model)
        optimizer = adamw(module, trainer.lr, trainer.weight_decay)
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        parameters = module.parameters()
        self.n_trained = sum(p.numel() for p in parameters if p.requires_grad)

    @property
    def model(self) -> nn.Module:
        """The model itself, without the wrappers of the step and of accelerate."""
        module: AlignmentModel = self.accelerator.unwrap_model(self.module)
        return module.model

    def _unsynced(self) -> AbstractContextManager[Any]:
        # holding back FSDP's reduction keeps whole gradients in memory
        return nullcontext() if sharded(self.accelerator) else self.accelerator.no_sync(self.module)

    def _resume(self, folder: Path) -> None:
        state = checkpoint.read_state(folder)
        for key, what in (("base_fingerprint", "base model"), ("tokens_sha256", "training examples")):
            if state[key] != self.about[key]:
                raise ConfigError(f"{folder}: the {what} is not what it was; start a new run")
        checkpoint.restore_model(folder, self.model)
        checkpoint.restore_optimizer(folder, self.model, self._inner_optimizer)
        checkpoint.restore_random(folder, self.accelerator.process_index, self.accelerator.device)
        self.step, self.best = state["step"], state["best"]
        self._saved = self.step
        if self.main:
            print(f"going on from {folder}", file=sys.stderr)

    @property
    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer

    # fit

    def fit(self) -> None:
        """Run the remaining steps; held-out loss and checkpoints on their way."""
        trainer = self.cfg.trainer
        if self.step == 0 and trainer.eval_every:
            self.evaluate(choose=False)
        with Counter("train", self.total, self.step) as bar:
            while self.step < self.total:
                metrics = self.train_step()
                self.step += 1
                self._log(metrics)
                if (trainer.eval_every and self.step % trainer.eval_every == 0) or self.step == self.total:
                    self.evaluate()
                if self.step % trainer.save_every == 0 or self.step == self.total:
                    self.save()
                bar.step(note=f"loss {metrics['total']:.4f}")

    def train_step(self) -> dict[str, Any]:
        """One optimiser step over the batch of `self.step`: gradients of the mean over its samples, then AdamW.

        Returns:
            Metrics of the whole batch, before the step.
        """
        began = perf_counter()
        trainer, indices = self.cfg.trainer, self.order.batch(self.step)
        rate = learning_rate(self.step, self.total, trainer.lr, trainer.warmup, trainer.schedule)
        for group in self._inner_optimizer.param_groups:
            group["lr"] = rate
        self.module.train()
        processes = self.accelerator.num_processes

        def backward(loss: Tensor) -> None:
            # gradients are averaged over processes, ours are shares of one global mean
            self.accelerator.backward(loss * processes)

        values = self._go_through(self.data.train, indices, self.passes, backward, trainer.gradient_accumulation)
        self._stop_if_not_finite(values, indices)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        chosen = [self.data.train.items[index] for index in indices]
        return {
            "step": self.step + 1,
            "kind": "train",
            **summary(self.cfg.objective, values),
            "lr": rate,
            "grad_norm": norm,
            "samples": len(indices),
            "tokens": sum(example.tokens for example in chosen),
            "answer_tokens": sum(len(example.answer) for example in chosen),
            "seconds": perf_counter() - began,
        }

    def _go_through(
        self,
        examples: Examples,
        indices: Sequence[int],
        passes: Sequence[Pass],
        backward: Callable[[Tensor], None] | None,
        pieces: int,
    ) -> dict[str, Tensor]:
        """Passes over the examples, each process its share; values by name for all of them, [len(indices)] float64."""
        accelerator, n = self.accelerator, len(indices)
        size = ceil(self.cfg.trainer.batch_size / accelerator.num_processes / pieces)
        microbatches = share(n, accelerator.process_index, accelerator.num_processes, size)
        found: dict[str, Tensor] = {}
        for number, places in enumerate(microbatches):
            # a process without samples left goes along with a weight of 0: its peers wait for it
            chosen = [examples.items[indices[place]] for place in places or [0]]
            batch = collate(chosen, [1 / n if places else 0.0] * len(chosen)).to(accelerator.device)
            sync = number == len(microbatches) - 1
            values = run(self.module, batch, passes, backward, self._unsynced, sync)
            for name, value in values.items():
                out = found.setdefault(name, torch.zeros(n, dtype=value.dtype, device=value.device))
                if places:
                    out[places] = value
        names = sorted(found)
        gathered: Tensor = accelerator.reduce(torch.stack([found[name] for name in names]), "sum")
        return dict(zip(names, gathered.cpu(), strict=True))

    def _clip(self) -> float:
        limit = self.cfg.trainer.clip or float("inf")
        norm: Any = self.accelerator.clip_grad_norm_(self.module.parameters(), limit)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not isfinite(value):
            self._fail("the gradient is not finite", [], {})
        return value

    def _stop_if_not_finite(self, values: dict[str, Tensor], indices: Sequence[int]) -> None:
        total = torch.stack(list(values.values())).sum(0)
        bad = [place for place in range(len(indices)) if not isfinite(float(total[place]))]
        if bad:
            ids = [self.data.train.items[indices[place]].id for place in bad]
            numbers = {name: [float(value[place]) for place in bad] for name, value in values.items()}
            self._fail("the loss is not finite", ids, numbers)

    def _fail(self, what: str, ids: list[str], numbers: dict[str, list[float]]) -> None:
        self.optimizer.zero_grad()
        folder = self.save()
        batch = [self.data.train.items[index].id for index in self.order.batch(self.step)]
        ids = ids or batch
        if self.main:
            report = {"step": self.step + 1, "what": what, "questions": ids, "batch": batch, "checkpoint": str(folder)}
            write_json(self.out / FAILURE, {**report, "values": {k: [str(x) for x in v] for k, v in numbers.items()}})
        raise ModelError(
            f"{what} in step {self.step + 1}, questions {', '.join(ids)}; the state before it is saved in {folder}, "
            f"numbers in {self.out / FAILURE}"
        )

    # evaluate and save

    @torch.no_grad()
    def evaluate(self, choose: bool = True) -> dict[str, Any] | None:
        """Held-out loss under x0, x1 and x2; None without held-out examples.

        Args:
            choose: whether the checkpoint is saved as the best one so far, if it is that on dev.
        """
        if not self.data.held_out.items:
            return None
        began = perf_counter()
        self.module.eval()
        size, sums = self.cfg.trainer.batch_size, dict[str, Tensor]()
        whole = (Pass((0, 1, 2), False),)
        for start in range(0, len(self.data.held_out), size):
            indices = range(start, min(start + size, len(self.data.held_out)))
            pieces = self.cfg.trainer.gradient_accumulation
            for name, value in self._go_through(self.data.held_out, indices, whole, None, pieces).items():
                sums[name] = torch.cat([sums[name], value]) if name in sums else value
        self.module.train()
        metrics: dict[str, Any] = {
            "step": self.step,
            "kind": "eval",
            "split": self.data.eval_split,
            **summary(self.cfg.objective, sums),
            "samples": len(self.data.held_out),
            "seconds": perf_counter() - began,
        }
        self._log(metrics)
        # test may be watched but must not choose a checkpoint
        if choose and self.data.eval_split != "test" and (self.best is None or metrics["ce0"] < self.best["ce0"]):
            self.best = {"step": self.step, "ce0": metrics["ce0"]}
            self.save()
        return metrics

    def save(self) -> Path:
        """Write the checkpoint of the present step, unless it is there already; remove older ones."""
        folder = checkpoint.folder_of(self.out, self.step)
        if self._saved == self.step:
            return folder
        accelerator = self.accelerator
        state = checkpoint.random_state(accelerator.device)[None].to(accelerator.device)
        extra = {
            "best": self.best,
            "base_fingerprint": self.base,
            "tokens_sha256": self.about["tokens_sha256"],
            "processes": accelerator.num_processes,
        }
        states = accelerator.gather(state)
        checkpoint.save(folder, self.step, self.model, self._inner_optimizer, states, extra, self.main)
        if self.main:
            if self.best is not None:
                write_json(self.out / BEST, self.best)
            best = None if self.best is None else int(self.best["step"])
            checkpoint.prune(self.out, self.cfg.trainer.keep_last, best)
        accelerator.wait_for_everyone()
        self._saved = self.step
        return folder

    def finish(self) -> None:
        """Close the trackers and say where the result is."""
        # end_training would also part the processes, which may train again
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.wait_for_everyone()
        if self.main:
            print(f"{self.step} steps, {self.n_trained:,} trained parameters; the run is in {self.out}")

    def _log(self, metrics: dict[str, Any]) -> None:
        if self.main:
            self.log.append(metrics)
        scalars = {
            f"{metrics['kind']}/{k}": v for k, v in metrics.items() if isinstance(v, int | float) and k != "step"
        }
        self.accelerator.log(scalars, step=metrics["step"])


def _resolved(cfg: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run folder can be read from anywhere."""
    if not cfg.states or not cfg.out or not cfg.model:
        raise ConfigError("states, model and out must be given")
    local = cfg.model != "nano" and Path(cfg.model).is_dir()
    model = str(Path(cfg.model).resolve()) if local else cfg.model
    return replace(cfg, states=str(Path(cfg.states).resolve()), out=str(Path(cfg.out).resolve()), model=model)
