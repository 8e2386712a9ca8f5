"""The training run: fit, evaluate, save. On one process or under `accelerate launch`, with equal results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from remind.alignment import checkpoint
from remind.alignment.config import TrainConfig
from remind.alignment.data import share
from remind.alignment.guard import REMEDY, Guard, OutOfMemory, in_memory, memory_error
from remind.alignment.metrics import load, peak_memory, summary
from remind.alignment.optim import learning_rate
from remind.alignment.run_folder import BEST, FAILURE
from remind.alignment.setup import set_up
from remind.alignment.step import AlignmentModel, Pass, collate, run
from remind.alignment.teachers import Ema, Live, Teachers
from remind.alignment.tokens import Example
from remind.core.distributed import sharded
from remind.core.errors import ConfigError, ModelError
from remind.core.processes import TERMINATED, Termination
from remind.core.progress import ProgressBar, warn


def train(cfg: TrainConfig) -> Path:
    """Train, or resume training, and save; prints where the result is.

    After SIGTERM to any process all of them end the step under way, save, and raise SystemExit with status 143; a
    resumed run goes on to the same weights.

    Returns:
        The run folder: config.yaml, data.json, metrics.jsonl, checkpoints/ and, with a dev split, best.json.

    Raises:
        ConfigError: the run folder is in use, or a resumed run differs from the one it goes on with.
        DataError: states that cannot be used.
        ModelError: a model or checkpoint that cannot be used; no memory, a loss that is not finite, or a collapse with
            guard mode stop, after the state before it and the questions have been saved; or no disk space.
    """
    trainer = Trainer(cfg)
    try:
        trainer.fit()
    finally:
        trainer.folder.close()
    trainer.finish()
    if trainer.stopped:
        raise SystemExit(TERMINATED)
    return trainer.folder.path


class Trainer:
    """One run. `step` counts finished optimiser steps; everything a resume needs follows from it and the weights.

    Attributes:
        stopped: whether `fit` ended early, because of SIGTERM.
        evaluated: the last step after which the held-out loss was measured; -1: none.
    """

    def __init__(self, cfg: TrainConfig) -> None:
        self.parts = parts = set_up(cfg)
        self.cfg, self.accelerator, self.folder = parts.cfg, parts.accelerator, parts.folder
        self.data, self.order, self.teachers = parts.data, parts.order, parts.teachers
        self.student_answers = parts.student_answers
        self.step, self.evaluated, self.stopped = 0, -1, False
        self.best: dict[str, float] | None = None
        self.guard = Guard(self.cfg.trainer.guard)
        self.termination = Termination()
        self._saved: int | None = None
        self._bar: ProgressBar | None = None
        if parts.start is not None:
            self._resume(parts.start)
        self.folder.begin(parts.about, self.step, self.evaluated)

    @property
    def model(self) -> nn.Module:
        """The language model itself, without the wrappers of the step and of accelerate."""
        module: AlignmentModel = self.accelerator.unwrap_model(self.parts.module)
        return module.model

    def _resume(self, folder: Path) -> None:
        state = checkpoint.read_state(folder)
        for key, what in (("base_fingerprint", "base model"), ("tokens_sha256", "training examples")):
            if state[key] != self.parts.about[key]:
                raise ConfigError(f"{folder}: the {what} has changed; start a new run")
        checkpoint.restore_model(folder, self.model)
        checkpoint.restore_optimizer(folder, self.model, self.parts.inner_optimizer)
        if isinstance(self.teachers, Ema):
            checkpoint.restore_ema(folder, self.teachers.shadow)
        checkpoint.restore_random(folder, self.accelerator.process_index, self.accelerator.device)
        self.step, self.best, self.evaluated = state["step"], state["best"], state["evaluated"]
        self.guard.restore(state["guard"])
        if self.student_answers is not None:
            self.student_answers.restore(state["answers"])
        self._saved = self.step
        if self.folder.main:
            print(f"resuming from {folder}", file=sys.stderr)

    # fit

    def fit(self) -> None:
        """Run the remaining steps; held-out loss and checkpoints on their way. Ends early on SIGTERM (`stopped`)."""
        with self.folder.held(), self.termination, ProgressBar("train", self.parts.total, self.step) as bar:
            self._bar = bar
            # a run that was stopped between a step and its evaluation makes up for it
            self._evaluate_if_due()
            while self.step < self.parts.total and not self.stopped:
                metrics = self.train_step()
                self.step += 1
                gathered = self._gather(float(self.termination.requested), metrics["memory_gib"])
                self.stopped = bool(gathered[:, 0].any())
                self.folder.record({**metrics, "memory_gib": float(gathered[:, 1].max())})
                loss = f"loss {metrics['total']:.4f}"
                bar.step(note=loss)
                self._evaluate_if_due()
                bar.step(0, note=loss)
                if self.step % self.cfg.trainer.save_every == 0 or self.step == self.parts.total:
                    self.save()
            if self.stopped:
                self.save()

    def _evaluate_if_due(self) -> None:
        every = self.cfg.trainer.eval_every
        due = self.step == self.parts.total or (every and self.step % every == 0)
        if due and self.evaluated < self.step and not self.stopped:
            self.evaluate(choose=self.step > 0)

    def train_step(self) -> dict[str, Any]:
        """One optimiser step over the batch of `self.step`: gradients of the mean over its samples, then AdamW.

        Returns:
            Metrics of the whole batch, before the step; `memory_gib` is this process's peak.
        """
        began = perf_counter()
        trainer, indices = self.cfg.trainer, self.order.batch(self.step)
        rate = learning_rate(self.step, self.parts.total, trainer.lr, trainer.warmup, trainer.schedule)
        for group in self.parts.inner_optimizer.param_groups:
            group["lr"] = rate
        self.parts.module.train()
        samples = [self.data.train.items[index] for index in indices]
        graded: list[Example] = []
        try:
            if self.student_answers is not None:
                samples = self.student_answers.at(self.step, self.model, self._note)
            if self.cfg.objective.lambda_hard > 0:
                graded = [other for sample in samples if (other := sample.with_gold) is not None]
            values = self._losses(samples, graded)
        except OutOfMemory as error:
            self._out_of_memory(error, f"step {self.step + 1}")
        if not all(value.isfinite().all() for value in values.values()):
            self._fail("the loss is not finite", values)
        norm = self._clip()
        self.parts.optimizer.step()
        self.parts.optimizer.zero_grad()
        if isinstance(self.teachers, Ema):
            self.teachers.update()
        levels = [level for step in self.parts.passes for level in step.levels]
        levels += self.teachers.levels if isinstance(self.teachers, Ema) else ()
        return {
            "step": self.step + 1,
            "kind": "train",
            **summary(self.cfg.objective, values),
            "lr": rate,
            "grad_norm": norm,
            **load(samples, levels, perf_counter() - began, graded, self.cfg.objective.hard_levels),
            "memory_gib": peak_memory(self.accelerator.device),
        }

    def _losses(self, samples: Sequence[Example], graded: Sequence[Example]) -> dict[str, Tensor]:
        """Gradients of the mean over samples, and values by name, [len(samples)].

        Args:
            graded: those whose gold answer is another than the one at which their edges teach, with the gold answer.
        """
        hard: dict[str, Tensor] = {}
        if graded:
            levels = [Pass((level,), True) for level in self.cfg.objective.hard_levels]
            hard = self.run_passes(graded, levels, Live(), self._backward, len(samples))
        values = self.run_passes(samples, self.parts.passes, self.teachers, self._backward)
        places = [place for place, sample in enumerate(samples) if sample.gold is not None]
        for level in self.cfg.objective.hard_levels if graded else ():
            values[f"hard{level}"][places] = hard[f"hard{level}"]
        return values

    def run_passes(
        self,
        samples: Sequence[Example],
        passes: Sequence[Pass],
        teachers: Teachers,
        backward: Callable[[Tensor], None] | None = None,
        hard_of: int | None = None,
    ) -> dict[str, Tensor]:
        """Passes over a batch of samples, each process its share in microbatches; gradients add up in the parameters.

        Args:
            backward: None: no gradients.
            hard_of: only hard losses count, of some among so many samples, and gradients are not exchanged yet.

        Returns:
            Values of all samples of the batch by name, [len(samples)] float64.

        Raises:
            OutOfMemory: on the process where it happened.
        """
        accelerator, module, n = self.accelerator, self.parts.module, len(samples)
        trainer, processes = self.cfg.trainer, accelerator.num_processes
        size = ceil(trainer.batch_size / processes / trainer.gradient_accumulation)
        places = share(n, accelerator.process_index, processes, size)
        # a process without samples left takes part with a weight of 0: the others wait for it
        chosen = [[samples[place] for place in own or [0]] for own in places]
        weight, hard_only = 1 / (hard_of or n), hard_of is not None
        batches = [
            collate(some, [weight if own else 0.0] * len(some), hard_only).to(accelerator.device)
            for own, some in zip(places, chosen, strict=True)
        ]
        # holding back FSDP's reduction would keep whole gradients in memory
        unsynced = nullcontext if sharded(accelerator) else partial(accelerator.no_sync, module)
        fixed = in_memory(chosen[0], partial(teachers.of, module, chosen, batches))
        values: dict[str, Tensor] = {}
        for number, (own, batch) in enumerate(zip(places, batches, strict=True)):
            last = number == len(places) - 1 and not hard_only
            step = partial(run, module, batch, passes, backward, unsynced, last, fixed[number] or None)
            for name, value in in_memory(chosen[number], step).items():
                out = values.setdefault(name, torch.zeros(n, dtype=value.dtype, device=value.device))
                if own:
                    out[own] = value
        names = sorted(values)
        gathered: Tensor = accelerator.reduce(torch.stack([values[name] for name in names]), "sum")
        return dict(zip(names, gathered.cpu(), strict=True))

    def _backward(self, loss: Tensor) -> None:
        # gradients are averaged over processes, ours are shares of one global mean
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def _gather(self, *numbers: float) -> Tensor:
        """Numbers of each process, [processes, len(numbers)] float64."""
        row = torch.tensor([numbers], dtype=torch.float64, device=self.accelerator.device)
        gathered: Tensor = self.accelerator.gather(row)
        return gathered.cpu()

    def _clip(self) -> float:
        limit = self.cfg.trainer.clip or float("inf")
        norm: Any = self.accelerator.clip_grad_norm_(self.parts.module.parameters(), limit)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not isfinite(value):
            self._fail("the gradient is not finite")
        return value

    def _fail(self, what: str, values: Mapping[str, Tensor] | None = None) -> NoReturn:
        """Save the state before the step, and name the questions whose values are not finite, or the whole batch."""
        self.parts.optimizer.zero_grad()
        folder = self.save()
        batch = [self.data.train.items[index].id for index in self.order.batch(self.step)]
        bad = [n for n in range(len(batch)) if not all(isfinite(float(value[n])) for value in (values or {}).values())]
        ids = [batch[n] for n in bad] or batch
        numbers = {name: [str(float(value[n])) for n in bad] for name, value in (values or {}).items()}
        report = {"step": self.step + 1, "what": what, "questions": ids, "batch": batch, "values": numbers}
        path = self.folder.write(FAILURE, {**report, "checkpoint": str(folder)})
        raise ModelError(
            f"{what} in step {self.step + 1}, questions {', '.join(ids)}; the state before it is saved in {folder}, "
            f"numbers in {path}"
        )

    def _out_of_memory(self, error: OutOfMemory, where: str) -> NoReturn:
        self.parts.optimizer.zero_grad()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        # with other processes waiting in the middle of the step nothing can be gathered from them
        alone = self.accelerator.num_processes == 1
        folder = self.save() if alone else checkpoint.newest(self.folder.path, report=False)
        report = {"what": "out of memory", "where": where, "questions": error.ids, "tokens": error.lengths}
        self.folder.write(FAILURE, {**report, "checkpoint": str(folder)})
        remaining = f"the state before it is saved in {folder}" if alone else f"the newest checkpoint is {folder}"
        raise memory_error(error, where, remaining)

    # evaluate and save

    @torch.no_grad()
    def evaluate(self, choose: bool = True) -> dict[str, Any] | None:
        """Held-out loss under x0, x1 and x2, teachers live; None without held-out examples, or if it was broken off.

        Args:
            choose: whether the checkpoint is saved as the best one so far, if it is that on dev.

        Raises:
            ModelError: guard mode stop and a collapse; or no memory. The state is saved before.
        """
        if not self.data.held_out.items:
            return None
        began = perf_counter()
        try:
            values = self._held_out()
        except OutOfMemory as error:
            self._out_of_memory(error, f"the held-out loss after step {self.step}")
        if values is None:
            self.stopped = True
            return None
        metrics: dict[str, Any] = {
            "step": self.step,
            "kind": "eval",
            "split": self.data.eval_split,
            **summary(self.cfg.objective, values),
            "samples": len(self.data.held_out),
            "seconds": perf_counter() - began,
        }
        self.folder.record(metrics)
        self.evaluated, self._saved = self.step, None
        if self.folder.main and (what := self.guard.unfamiliar(metrics, self.cfg.model)):
            warn(what)
        collapses = self.guard.collapses(metrics)
        # test may be monitored but must not choose a checkpoint
        if choose and self.data.eval_split != "test" and (self.best is None or metrics["ce0"] < self.best["ce0"]):
            self.best = {"step": self.step, "ce0": metrics["ce0"]}
            self.save()
        if collapses:
            self._collapsed(collapses)
        return metrics

    def _held_out(self) -> dict[str, Tensor] | None:
        """Values of all held-out examples by name; None if SIGTERM came to any process."""
        examples, size = self.data.held_out, self.cfg.trainer.batch_size
        parts: dict[str, list[Tensor]] = {}
        self.parts.module.eval()
        for start in range(0, len(examples), size):
            samples = examples.items[start : start + size]
            for name, value in self.run_passes(samples, (Pass((0, 1, 2), False),), Live()).items():
                parts.setdefault(name, []).append(value)
            self._note(f"held-out loss of {start + len(samples)} of {len(examples)}")
            if self._gather(float(self.termination.requested)).any():
                return None
        self.parts.module.train()
        return {name: torch.cat(values) for name, values in parts.items()}

    def _note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.step(0, note=text)

    def _collapsed(self, collapses: list[str]) -> None:
        what = f"collapse on held-out questions at step {self.step}: {'; '.join(collapses)}"
        self.folder.record({"step": self.step, "kind": "guard", "what": collapses})
        if self.cfg.trainer.guard.mode == "stop":
            raise ModelError(
                f"{what}; saved in {self.save()}; {REMEDY}, or trainer.guard.mode warn to continue this one"
            )
        if self.folder.main:
            warn(f"{what}; {REMEDY}")

    def save(self) -> Path:
        """Write the checkpoint of the present step, unless it is there already; remove older ones.

        Raises:
            ModelError: it cannot be written; the ones before it are as they were.
        """
        folder = checkpoint.folder_of(self.folder.path, self.step)
        if self._saved == self.step:
            return folder
        accelerator = self.accelerator
        state = checkpoint.random_state(accelerator.device)[None].to(accelerator.device)
        extra = {
            "best": self.best,
            "evaluated": self.evaluated,
            "guard": self.guard.state(),
            "base_fingerprint": self.parts.about["base_fingerprint"],
            "tokens_sha256": self.parts.about["tokens_sha256"],
            "processes": accelerator.num_processes,
        }
        if self.student_answers is not None:
            extra["answers"] = self.student_answers.state(self.step)
        states = accelerator.gather(state)
        ema = self.teachers.shadow if isinstance(self.teachers, Ema) else None
        optimizer = self.parts.inner_optimizer
        checkpoint.save(folder, self.step, self.model, optimizer, states, extra, self.folder.main, ema)
        if self.folder.main:
            if self.best is not None:
                self.folder.write(BEST, self.best)
            best = None if self.best is None else int(self.best["step"])
            checkpoint.prune(self.folder.path, self.cfg.trainer.keep_last, best)
        accelerator.wait_for_everyone()
        self._saved = self.step
        return folder

    def finish(self) -> None:
        """Print where the result is."""
        self.accelerator.wait_for_everyone()
        if self.folder.main and self.stopped:
            print(
                f"stopped by SIGTERM at step {self.step} of {self.parts.total}; set resume to continue", file=sys.stderr
            )
        elif self.folder.main:
            trained = sum(p.numel() for p in self.parts.module.parameters() if p.requires_grad)
            print(f"{self.step} steps, {trained:,} trained parameters; the run is in {self.folder.path}")
