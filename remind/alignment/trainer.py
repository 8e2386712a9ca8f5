"""`PRATrainer`: Progressive Reflective Alignment (Section 4.5) as a `transformers.Trainer`, and the base of its runs.

What is ours is the step: levels run teachers first, each backward before the next forward, logits in recomputed chunks.
The loop, schedules, optimisers, trackers, callbacks, FSDP2 and the format of checkpoints are transformers' and
accelerate's.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object, send_to_device
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from remind.alignment.arguments import PRAConfig, rounding_optimizer
from remind.alignment.callbacks import REMEDY, CollapseGuard
from remind.alignment.config import ExampleConfig, Objective
from remind.alignment.examples import Batches, Example, Examples, examples_of, select
from remind.alignment.metrics import METRICS, checkpoints, kept, newest, read_metrics, record, summary
from remind.alignment.model import add_marker, check_head, fingerprint, opened, trainable
from remind.alignment.step import AlignmentModel, MicroBatch, Pass, check_memory, collate, out_of_memory, plan, run
from remind.alignment.targets import BaseTargets, Ema, StudentAnswers, decoded
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import Cache, follow_umask, write_rows
from remind.core.processes import Termination
from remind.core.progress import close_bars, without_loading_bars
from remind.core.run_folder import RunFolder
from remind.models.generate import end_tokens
from remind.models.images import Pictures

#: Averages of the weights, in a checkpoint.
EMA = "ema.safetensors"
#: Arguments besides those of the objective and the examples that a resumed run must keep.
_KEPT = (
    *("batch_size", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("bf16", "seed", "data_seed", "adam_beta1", "adam_beta2", "adam_epsilon"),
)
#: Of the objective's and the examples' arguments those that do not touch the trajectory of the weights.
_FREE = frozenset({"chunk", "cache", "image_root"})


class RunTrainer(Trainer):
    """A trainer with a run folder: one writer, an end where a signal asks for it, and the same bits after a kill.

    metrics.jsonl has a row of each step. `PRATrainer` and the trainers of `remind.memory_training` are made of it.
    A subclass says what a run must keep (`_settings`), what of the model accelerate wraps (`_module`), adds a row to
    `_rows` before each step of the optimiser, and sets `_stop` where a process was sent a signal.
    """

    model: Any
    _wrapped: Any = None
    _sharded, _stop = False, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(RunState(self))
        #: Metrics of the steps since the last line of the log.
        self._rows: list[dict[str, Any]] = []
        self._signals = Termination()

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must keep, as JSON values or sets."""
        return {}

    def _more(self) -> dict[str, Any]:
        """What a checkpoint keeps besides, as JSON values."""
        return {}

    def _module(self, model: nn.Module) -> nn.Module:
        """What is run in a step, of which the model is a part."""
        return model

    def _begin(self, start: Path | None) -> None:
        """Before training from a checkpoint, or from the start; the folder is ours."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; or go on with a run.

        SIGTERM and Ctrl-C end the step under way on all processes, save, and raise SystemExit (143, 130).

        Args:
            resume_from_checkpoint: a checkpoint, or True: the newest whole one in `output_dir`, the start if there is
                none.

        Raises:
            ConfigError: the folder is in use or holds a run, or a resumed run differs from the one it goes on with.
            ModelError: no memory, or a loss or gradient that is not finite, with the newest checkpoint. A checkpoint
                that cannot be read or written.
        """
        out, leads = Path(self.args.output_dir), self.is_world_process_zero()
        with RunFolder(out).held() if leads else nullcontext():
            start = self._start(out, resume_from_checkpoint)
            self._begin(start)
            try:
                with self._signals:
                    result = super().train(str(start) if start else None, **kwargs)
            except Exception as error:  # of safetensors, and of torch's restricted unpickler
                if type(error).__name__ not in ("SafetensorError", "UnpicklingError"):
                    raise
                reason = " ".join(str(error).split())[:200]
                raise ModelError(f"{start}: a file of it cannot be read ({reason}); remove it, and resume") from None
        if self._stop and self.state.global_step < self.state.max_steps:
            close_bars()
            if leads:
                step = f"step {self.state.global_step} of {self.state.max_steps}"
                print(f"stopped by {signal.Signals(self._stop).name} at {step}; resume to continue", file=sys.stderr)
            raise SystemExit(128 + self._stop)
        return result

    def _start(self, out: Path, resume: str | bool | None) -> Path | None:
        """The checkpoint to go on from; those that are not whole are removed."""
        leads, found = self.is_world_process_zero(), checkpoints(out)
        broken = [folder for folder in found if not kept(folder)]
        # those of another trainer have no mark either, but their runs have no metrics of ours
        if (found and not resume) or (broken and not (out / METRICS).is_file()):
            raise ConfigError(f"{out} already holds a run; choose another output_dir, or resume it if it is ours")
        self.accelerator.wait_for_everyone()
        if leads:
            for folder in broken:
                print(f"warning: {folder} was not written to its end, and is removed", file=sys.stderr)
                shutil.rmtree(folder)
            (out / METRICS).touch()
        self.accelerator.wait_for_everyone()
        start = newest(out) if resume is True else Path(resume) if resume else None
        step, self._kept = -1, json.loads(json.dumps(self._settings(), default=sorted))
        if start is not None:
            if (saved := kept(start)) is None:
                raise ConfigError(f"{start}: not a checkpoint of {type(self).__name__}, or not written to its end")
            if changed := sorted(name for name, value in self._kept.items() if saved["settings"].get(name) != value):
                hint = "start a new run (only one at a constant rate can be made longer)"
                raise ConfigError(f"{start} is of a run with other settings ({', '.join(changed)}); {hint}")
            step = int(start.name.rpartition("-")[2])
        if leads:
            # steps after the checkpoint are run again
            write_rows(out / METRICS, [row for row in read_metrics(out) if row["step"] <= step])
        return start

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        model = self.model
        self.model = self.model_wrapped = self._module(model)
        self._wrapped, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.model = self.callback_handler.model = model
        if resume_from_checkpoint is not None:
            if self._sharded:
                self._load_from_checkpoint(resume_from_checkpoint, model)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return self._wrapped, loader

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = super()._get_grad_norm(model, grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not isfinite(value):
            self._fail("the gradient is not finite")
        self._rows[-1]["grad_norm"] = value
        return value

    def _fail(self, what: str, about: str = "") -> NoReturn:
        where, saved = f"step {self.state.global_step + 1}", newest(self.args.output_dir)
        raise ModelError(f"{what} in {where}{about}; the newest checkpoint is {saved}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The terms of the steps since the last line are averaged beside transformers' numbers."""
        if "loss" in logs and self._rows:
            names = [name for name, value in self._rows[-1].items() if isinstance(value, float)]
            logs = {name: fmean(row[name] for row in self._rows if name in row) for name in names} | logs
            self._rows = []
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (SafetensorError, RuntimeError, OSError) as error:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{folder} cannot be written ({reason}); checkpoints before it are as they were") from None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # what comes next, trainer_state.json, says that all is there
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with without_loading_bars():
            super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save and folder.is_dir():
            (folder / "training_args.bin").unlink(missing_ok=True)
            follow_umask(folder)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: a step reads several prompts; `tokens` in the metrics counts what it reads."""
        return 0


class RunState(TrainerCallback, ExportableState):
    """What happens between steps, and what trainer_state.json keeps of a run besides transformers' own."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"settings": self.trainer._kept, **self.trainer._more()}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            record(args.output_dir, self.trainer._rows[-1])
        if self.trainer._stop:
            # a held-out measurement that is due comes first, so that the resumed run has all that others have
            control.should_save = control.should_training_stop = True


class PRATrainer(RunTrainer):
    """Distils the higher states of a question into the factual one (Eq. 6-7).

    ```python
    trainer = PRATrainer(model="smollm2", args=PRAConfig("runs/pra"), train_dataset=rows, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model("runs/model")
    ```

    It differs from TRL's distillation trainers in three things: the teacher is the model itself under another context
    (as in TRL's SDFT), contexts form a ladder with a list of edges, and both directions of KL count.

    Args:
        model: a causal or vision-language model, or its folder, hub id or built-in name. Of a model without adapters
            the language model and its head are trained, and with `train_vision` the vision tower.
        train_dataset, eval_dataset: rows with `x0`, `x1`, `x2` (texts, or mappings with `text`; the levels that the
            objective needs), `target` (None: no gold answer) and `question_id`: a `datasets.Dataset`, a list of
            dictionaries, or any iterable of such.
        processing_class: tokenizer with a chat template, or processor; of a model given by name its own.
        peft_config: adapters to train, in place of all weights. quantization_config: of transformers, for a model
            given by name.
        optimizers: optimiser and scheduler, in place of those that `args` name.

    Raises:
        ConfigError: settings that cannot work. DataError: rows that cannot be used, or none that are left.
        ModelError: a model that cannot be used.
    """

    model: Any
    args: PRAConfig
    eval_split = "dev"  #: as rows of held-out measurements are marked
    check: dict[str, Any] | None = None  #: what the teacher was found to add before training, for data.json
    _teachers: BaseTargets | Ema | None = None
    _student: StudentAnswers | None = None
    _began = 0.0

    def __init__(
        self,
        model: Any,
        args: PRAConfig | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **kwargs: Any,
    ) -> None:
        args = args or PRAConfig("pra")
        self.objective, self._sharded = args.objective, args.sharded
        self._passes = plan(self.objective, args.prefix_sharing)
        if self._sharded and (quantization_config is not None or args.targets == "on_policy"):
            raise ConfigError("a sharded model can neither be in 4 bits nor answer: use DDP (ddp_2gpu.yaml)")
        torch.manual_seed(args.seed)  # of the adapters' first values
        # FSDP shards what is on the CPU; otherwise weights go straight to their device
        device = "cpu" if self._sharded else str(args.device)
        self.backbone = opened(model, processing_class, args.dtype, device, quantization_config)
        marker = add_marker(self.backbone) if args.marker_token else None
        self.base = fingerprint(self.backbone.model)
        pixels = args.images == "pixels"
        self.shown = Pictures(self.backbone, args.image_tokens, args.image_root) if pixels else None
        train, held_out = (self._examples(rows) for rows in (train_dataset, eval_dataset))
        ids = (ids for example in [*train, *held_out] for ids in (*example.prompts, example.answer) if len(ids))
        check_head(self.backbone.model, max((int(some.max()) for some in ids), default=0))
        trained = trainable(self.backbone.model, peft_config, args.train_vision, marker)
        self.backbone = replace(self.backbone, model=trained)
        # what is saved ends its answers as training does
        trained.generation_config.eos_token_id = end_tokens(self.backbone.tokenizer, trained.generation_config)
        super().__init__(
            model=trained,
            args=args,
            data_collator=collate,
            train_dataset=Examples(),
            eval_dataset=Examples(),
            processing_class=processing_class or self.backbone.processor or self.backbone.tokenizer,
            callbacks=[*(callbacks or ()), _Measured(self)],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=None if optimizers[0] else rounding_optimizer(args, trained),
            **kwargs,
        )
        self._cache = Cache(args.cache or Path(args.output_dir) / "cache")
        self.guard = CollapseGuard(args.guard, args.guard_ce_rise, args.guard_entropy_share)
        self.add_callback(self.guard)
        self.train_dataset: Examples = self._selected(train)
        self.eval_dataset: Examples = self._selected(held_out, held_out=True)
        if not self.eval_dataset.items:
            args.eval_strategy = type(args.eval_strategy)("no")
        self._collate = partial(collate)
        if train_dataset is not None:
            self._check_examples()
        #: By microbatch of the step under way: its samples that count here, and their values by name.
        self._seen: list[tuple[list[Example], dict[str, Tensor]]] = []
        if self._sharded:
            self._configure_fsdp()

    # data

    def _examples(self, rows: Any) -> list[Example]:
        return examples_of(self.backbone.tokenizer, rows, self.shown)

    def _selected(self, examples: list[Example], held_out: bool = False) -> Examples:
        """Those that can be used, with decoded answers where `targets` and `unlabelled` ask for them.

        Args:
            held_out: only where none has a gold answer, decoded ones are taken.
        """
        args, train = self.args, not held_out
        if held_out and any(len(e.answer) for e in examples):
            examples = [e for e in examples if len(e.answer)]
        wanted = [e for e in examples if not len(e.answer) or (train and args.targets == "decoded")]
        if wanted and args.unlabelled != "skip" and not (train and args.targets == "on_policy"):
            with self._at_work():
                found = decoded(self.backbone, wanted, args, self._cache, self.base, self.accelerator)
            answered = {e.id: e.answering(found[e.id]) if e.id in found else e.unanswered for e in wanted}
            examples = [answered.get(e.id, e) for e in examples]
        return select(examples, args, self.backbone.max_length, held_out)

    def _check_examples(self) -> None:
        train, args, leads = self.train_dataset, self.args, self.is_world_process_zero()
        left_out = ", ".join(f"{count} {reason}" for reason, count in train.left_out.items())
        if not train.items:
            hint = "give them answers, or a state in `unlabelled` from which the model answers them"
            raise DataError(f"nothing to train on; questions left out: {left_out or 'none'}; {hint}")
        if missing := sorted((self.objective.levels | self.objective.taught) - train.levels()):
            raise DataError(f"an edge or hard level needs x{missing[0]}, and the data have no such column")
        if not self.objective.active and not train.labelled():
            raise ConfigError("nothing is trained: no question has a gold answer, and no edge has gamma above 0")
        everything = [*train.items, *self.eval_dataset.items]
        pictured = [bool(example.images) for example in everything]
        if args.train_vision and not any(pictured[: len(train)]):
            raise ConfigError("train_vision: no training example shows an image as pixels (images pixels)")
        if self._sharded and any(pictured) and args.prefix_sharing:
            raise ConfigError("images pixels: FSDP needs prefix_sharing false; or use DDP, or captions")
        # processes that wait for each other in the tower, or in every forward, must all run the same parts
        together = any(pictured) and (self._sharded or args.train_vision) and self.accelerator.num_processes > 1
        # under FSDP processes run as many passes, also where one has no sample with two answers
        two = self._sharded and any(e.gold is not None for e in train.items)
        blank = self.shown.blank if together and self.shown is not None else None
        self._collate = partial(collate, always_graded=two, blank=blank)
        if leads and left_out:
            print(f"left out of training: {left_out}", file=sys.stderr)
        longest = max(example.longest for example in everything)
        answer = max(len(answer) for example in everything for answer in example.answers)
        check_memory(self.model, args, longest, answer, self.accelerator.device, say=leads)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The model on the device it is to be run on, also where FSDP takes it from the CPU."""
        if self._sharded:
            self.model.to(self.accelerator.device)
        yield
        if self._sharded:
            self.model.to("cpu")

    def get_train_dataloader(self) -> DataLoader:
        """Microbatches of this process; which samples a step has depends on seed and step alone."""
        args = self.args
        self._order = self._batches(self.train_dataset, args.batch_size, args.gradient_accumulation_steps)
        function: Any = self._collate
        if args.targets == "on_policy":
            own, function = self.train_dataset.items, list
            self._student = StudentAnswers(self.backbone, args, self.accelerator, self._order, own)
        workers = args.dataloader_num_workers
        return _Loader(self.train_dataset, batch_sampler=self._order, collate_fn=function, num_workers=workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Held-out microbatches of this process.

        Args:
            eval_dataset: rows as for training; None: those given to the trainer.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = rows if isinstance(rows, Examples) else self._selected(self._examples(rows), held_out=True)
        if not len(examples):
            raise DataError("no held-out questions: give the trainer an eval_dataset")
        size = (self.args.per_device_eval_batch_size or 1) * self.accelerator.num_processes
        return DataLoader(examples, batch_sampler=self._batches(examples, size, 1, False), collate_fn=self._collate)

    def _batches(self, examples: Examples, size: int, pieces: int, shuffle: bool = True) -> Batches:
        state, args = self.accelerator, self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return Batches(len(examples), size, pieces, state.process_index, state.num_processes, seed, shuffle)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The microbatches of a step. Samples have been counted: each carries its weight in the mean over the batch."""
        return list(islice(epoch_iterator, num_batches)), None

    # the step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of one microbatch over the levels of the objective; gradients add up."""
        self._began = self._began or perf_counter()
        model.train()
        examples = inputs.examples if self._student is None else [example for example, _ in inputs]
        where = f"step {self.state.global_step + 1}"
        total: Tensor = self._in_memory(examples, where, partial(self._run, model, inputs))
        if self.accelerator.sync_gradients:
            self._end_step()
        # transformers averages over processes, ours are shares of one global mean
        return total * self.accelerator.num_processes

    def _run(self, model: nn.Module, inputs: Any) -> Tensor:
        """The loss, detached; the values of all samples are kept for the end of the step."""
        if self._student is not None:
            answers = self._student.at(self.state.global_step)
            inputs = self._collate([(e.answering(answers[e.id]), weight) for e, weight in inputs])
        batch: MicroBatch = send_to_device(inputs, self.accelerator.device)
        total = torch.zeros((), device=batch.targets.device)
        own = batch.weights > 0

        def backward(loss: Tensor) -> None:
            total.add_(loss.detach())
            # gradients are averaged over processes
            self.accelerator.backward(loss * self.accelerator.num_processes)

        fixed = None if self._teachers is None else self._teachers.of(model, batch)
        # holding back FSDP's reduction would keep whole gradients in memory
        unsynced = nullcontext if self._sharded else partial(self.accelerator.no_sync, model)
        hard = self.objective.hard_levels if self.objective.lambda_hard > 0 else ()
        values = run(model, batch, self._passes, backward, unsynced, fixed, hard)
        self._seen.append((batch.own, {name: value[own] for name, value in values.items()}))
        return total

    def _reduced(self, seen: Sequence[Mapping[str, Tensor]], *counts: float) -> list[Any]:
        """Counts over all processes, and last the means of values by name if the first count is that of samples.

        Takes note of a signal that any process was sent; SIGTERM goes before SIGINT.
        """
        names = sorted({name for values in seen for name in values})
        sums = [torch.cat([values[name] for values in seen]).sum()[None] for name in names]
        row = torch.tensor([self._signals.requested, *counts], dtype=torch.float64, device=self.accelerator.device)
        rows = self.accelerator.gather(torch.cat([row, *sums])[None])
        self._stop = int(rows[:, 0].max())
        numbers = rows.sum(0).tolist()[1:]
        means = {name: value / (numbers[0] or 1) for name, value in zip(names, numbers[len(counts) :], strict=True)}
        return [*numbers[: len(counts)], means]

    def _end_step(self) -> None:
        """Before the optimiser's step: the metrics of the batch; a loss that is not finite ends the run."""
        own = [example for examples, _ in self._seen for example in examples]
        levels = [level for step in self._passes for level in step.levels]
        levels += self._teachers.levels if isinstance(self._teachers, Ema) else ()
        hard = self.objective.hard_levels
        tokens = sum(e.tokens_under(levels) + (e.with_gold.tokens_under(hard) if e.with_gold else 0) for e in own)
        answers = sum(len(example.answer) for example in own)
        seen = [values for _, values in self._seen]
        n, tokens, answers, means = self._reduced(seen, len(own), tokens, answers)
        if not all(map(isfinite, means.values())):
            self._fail("the loss is not finite")
        seconds = perf_counter() - self._began
        row = {
            "step": self.state.global_step + 1,
            "kind": "train",
            **summary(self.objective, means),
            "lr": self._get_learning_rate(),
            "samples": int(n),
            "tokens": int(tokens),
            "answer_tokens": int(answers),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
        if self.accelerator.device.type == "cuda":
            row["memory_gib"] = torch.cuda.max_memory_allocated(self.accelerator.device) / 2**30
        self._rows.append(row)

    def _fail(self, what: str, about: str = "") -> NoReturn:
        ids = gather_object([example.id for examples, _ in self._seen for example in examples])
        super()._fail(what, about or f", questions {', '.join(ids)}")

    def _in_memory(self, examples: Sequence[Example], where: str, work: Callable[[], Any]) -> Any:
        """Do the work on some examples. Raises ModelError, which names them, where memory is short."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if (what := out_of_memory(error, examples)) is None:
                raise
            saved = newest(self.args.output_dir)
            raise ModelError(f"out of memory in {where}, {what}; the newest checkpoint is {saved}") from None

    # evaluation

    @torch.no_grad()
    def evaluation_loop(self, dataloader: Any, description: str, **kwargs: Any) -> EvalLoopOutput:  # type: ignore[override]
        """Held-out loss under the levels that the questions have, teachers live.

        Returns:
            Metrics with the prefix: `loss` (Eq. 7), `ce0`, `entropy0`, `dist01`, `jsd01`, …, means over questions.
        """
        examples: Any = dataloader.dataset
        module = self._wrapped or AlignmentModel(self.model, self.objective).to(self.accelerator.device)
        passes = (Pass(tuple(sorted(examples.levels())), False),)
        was_training, began = module.training, perf_counter()
        module.eval()
        seen: list[dict[str, Tensor]] = []
        count = 0
        for batch in dataloader:
            batch = send_to_device(batch, self.accelerator.device)
            values = self._in_memory(batch.examples, "the held-out loss", partial(run, module, batch, passes, None))
            seen.append({name: value[batch.weights > 0] for name, value in values.items()})
            count += len(batch.own)
        module.train(was_training)
        n, means = self._reduced(seen, count)
        figures = summary(self.objective, means)
        if self.is_in_train and self.is_world_process_zero():
            row = {"step": self.state.global_step, "kind": "eval", "split": self.eval_split, **figures}
            record(self.args.output_dir, {**row, "samples": int(n), "seconds": perf_counter() - began})
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = {f"{prefix}_{name}": value for name, value in {**figures, "loss": figures["total"]}.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=int(n))

    # the run

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; or go on with a run, as `RunTrainer.train`.

        Raises:
            ModelError: besides, a collapse with guard stop, after its state has been saved. A loss or gradient that is
                not finite, and no memory, with the questions.
        """
        result = super().train(resume_from_checkpoint, **kwargs)
        if self.guard.collapse is not None:
            saved = newest(self.args.output_dir)
            raise ModelError(f"{self.guard.collapse}; saved in {saved}; {REMEDY}, or guard warn to continue")
        return result

    def _begin(self, start: Path | None) -> None:
        """Targets of the model as it is before training, while it is."""
        self.args.eval_on_start = start is None and self.args.eval_strategy != "no"
        if self._teachers is not None and self.objective.teacher_model_kind == "base":
            return  # train() again: the weights are no longer those before training
        self._teachers = None
        if self.objective.teacher_model_kind == "base" and self.objective.taught and self.args.targets != "on_policy":
            module = AlignmentModel(self.model.eval(), self.objective)
            with self._at_work():
                self._teachers = BaseTargets(module, self.train_dataset.items, self.base, self._cache, self.accelerator)

    def _settings(self) -> dict[str, Any]:
        values = self.args.to_dict()
        ours = [field.name for kind in (Objective, ExampleConfig) for field in fields(kind) if field.name not in _FREE]
        # the rate is that of any length
        free = {"constant"} if 0 < values["warmup_steps"] < 1 else {"constant", "constant_with_warmup", "inverse_sqrt"}
        length = () if values["lr_scheduler_type"] in free else ("max_steps", "num_train_epochs")
        kept = {name: values[name] for name in (*_KEPT, *length, *ours)}
        adapters = (getattr(self.model, "peft_config", None) or {}).get("default")
        kept |= {
            "sharded": self._sharded,
            "base model": self.base,
            "training examples": self.train_dataset.fingerprint(),
            "adapters": [getattr(adapters, name, None) for name in ("r", "lora_alpha", "target_modules")],
        }
        return kept

    def _more(self) -> dict[str, Any]:
        coming = self._student.answers if self._student else {}
        answers = {step: own for step, own in coming.items() if int(step) >= self.state.global_step}
        return {"base_fingerprint": self.base, "guard": [self.guard.first, self.guard.lowest], "answers": answers}

    def _module(self, model: nn.Module) -> nn.Module:
        return AlignmentModel(model, self.objective)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.objective.taught and self._teachers is None:
            # targets at answers that are not known yet cannot be cached: an average that never moves gives them
            decay = 1.0 if self.objective.teacher_model_kind == "base" else self.objective.ema_decay
            self._teachers = Ema(self.model, decay, sorted(self.objective.taught), self.args.prefix_sharing)
        if resume_from_checkpoint is not None:
            if isinstance(self._teachers, Ema):
                self._teachers.restore(Path(resume_from_checkpoint) / EMA)
            saved = kept(Path(resume_from_checkpoint)) or {}
            self.guard.first, self.guard.lowest = saved["guard"]
            if self._student is not None:
                self._student.answers = saved["answers"]
        return prepared

    def _configure_fsdp(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = self.accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ConfigError("training under FSDP needs fsdp_version 2 (configs/accelerate/fsdp2_2gpu.yaml)")
        # checkpoints that any number of processes opens
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("FULL_STATE_DICT")
        if self.accelerator.mixed_precision == "bf16":
            # inputs keep their precision: positions and weights of samples must not be rounded
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

    def _save_rng_state(self, output_dir: str) -> None:
        if isinstance(self._teachers, Ema):
            self._teachers.save(Path(output_dir) / EMA, self.args.should_save)
        super()._save_rng_state(output_dir)


class _Loader(DataLoader):  # type: ignore[type-arg]
    """transformers tells it the epoch, of which the order is a function."""

    def set_epoch(self, epoch: int) -> None:
        order: Any = self.batch_sampler
        order.set_epoch(epoch)


class _Measured(TrainerCallback):
    """What happens between steps to averages of weights, held-out measurements and the best checkpoint."""

    def __init__(self, trainer: PRATrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer._teachers, Ema):
            self.trainer._teachers.update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._seen, self.trainer._began = [], 0.0
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name, saves = args.metric_for_best_model, args.save_strategy != "no" and state.global_step > 0
        if name and saves and kwargs["metrics"][f"eval_{name}"] < (state.best_metric or float("inf")):
            control.should_save = True
