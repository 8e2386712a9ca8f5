"""`PRATrainer`: Progressive Reflective Alignment (Section 4.5) as a `transformers.Trainer`.

What is ours is the step: levels run teachers first, each backward before the next forward, logits in recomputed chunks.
The loop, schedules, optimisers, trackers, callbacks, FSDP2 and the format of checkpoints are transformers' and
accelerate's.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, rotate_checkpoints

from remind.alignment.answers import StudentAnswers, Writer, decoded
from remind.alignment.arguments import PRAConfig, rounding_optimizer
from remind.alignment.callbacks import REMEDY, CollapseGuard
from remind.alignment.checkpoints import COMPLETE, EMA, OURS, checkpoints, is_whole, newest, read_from
from remind.alignment.config import ExampleConfig, Objective
from remind.alignment.examples import Batches, Example, Examples, examples_of, select
from remind.alignment.memory import is_out_of_memory, memory_plan, remedies
from remind.alignment.metrics import METRICS, peak_memory, read_metrics, record, summary
from remind.alignment.model import add_marker, check_head, check_vocabulary, fingerprint, opened, trainable
from remind.alignment.step import AlignmentModel, MicroBatch, Pass, collate, plan, run
from remind.alignment.teachers import BaseTargets, Ema, Teachers
from remind.core.cache import Cache
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import read_json, write_json, write_rows
from remind.core.processes import Termination
from remind.core.progress import without_loading_bars
from remind.core.run_folder import RunFolder
from remind.models.images import Pictures

#: What transformers adds to a measurement and our rows do not have.
_OF_TRANSFORMERS = ("epoch", "loss", "runtime", "steps_per_second", "samples_per_second")
#: Arguments besides those of the objective and the examples that a resumed run must keep.
_KEPT = (
    *("batch_size", "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim"),
    *("weight_decay", "max_grad_norm", "bf16", "seed", "data_seed", "adam_beta1", "adam_beta2", "adam_epsilon"),
)
#: Of the objective's and the examples' arguments those that do not touch the trajectory of the weights.
_FREE = frozenset({"chunk", "cache", "image_root"})


class PRATrainer(Trainer):
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
        self.objective, self.examples_config = args.objective, args.examples
        self._sharded = args.sharded
        self._passes = plan(self.objective, args.prefix_sharing)
        if self._sharded and (quantization_config is not None or args.targets == "on_policy"):
            what = "a model in 4 bits cannot be sharded" if quantization_config else "a sharded model cannot answer"
            raise ConfigError(f"{what}; use DDP (configs/accelerate/ddp_2gpu.yaml)")
        torch.manual_seed(args.seed)  # of the adapters' first values
        # FSDP shards what is on the CPU; otherwise weights go straight to their device
        device = "cpu" if self._sharded else str(args.device)
        self.backbone = opened(model, processing_class, args.dtype, device, quantization_config)
        marker = add_marker(self.backbone) if args.marker_token else None
        check_head(self.backbone.model)
        self.base = fingerprint(self.backbone.model)
        pixels = args.images == "pixels"
        self.shown = Pictures(self.backbone, args.image_tokens, args.image_root) if pixels else None
        train, held_out = self._tokenised(train_dataset), self._tokenised(eval_dataset)
        trained: Any = trainable(self.backbone.model, peft_config, args.train_vision, marker)
        self.backbone = replace(self.backbone, model=trained)
        if optimizers[0] is None:
            args.check_precision(trained)
        super().__init__(
            model=trained,
            args=args,
            data_collator=collate,
            train_dataset=Examples(),
            eval_dataset=Examples(),
            processing_class=processing_class or self.backbone.processor or self.backbone.tokenizer,
            callbacks=list(callbacks or ()),
            optimizers=optimizers,
            optimizer_cls_and_kwargs=rounding_optimizer(args),
            **kwargs,
        )
        self.eval_split = "dev"
        self.guard = CollapseGuard(args.guard, args.guard_ce_rise, args.guard_entropy_share)
        self.add_callback(self.guard)
        self.add_callback(_Flow(self))
        self.train_dataset: Examples = self._selected(train, self.examples_config)
        self.eval_dataset: Examples = self._held_out(held_out)
        if not self.eval_dataset.items:
            args.eval_strategy = type(args.eval_strategy)("no")
        if train_dataset is not None:
            self._check_examples()
        self._wrapped: nn.Module | None = None
        self._teachers: Teachers | None = None
        self._student: StudentAnswers | None = None
        self._stop, self._began = 0, 0.0
        self._row: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._signals = Termination()
        #: By microbatch of the step under way: its samples that count here, and their values by name.
        self._seen: list[tuple[list[Example], dict[str, Tensor]]] = []
        if self._sharded:
            self._configure_fsdp()

    # data

    def _tokenised(self, rows: Iterable[Any] | None) -> list[Example]:
        examples = examples_of(self.backbone.tokenizer, () if rows is None else rows, self.shown)
        if twice := [name for name, count in Counter(example.id for example in examples).items() if count > 1]:
            raise DataError("the question occurs twice", record=twice[0])
        return examples

    def _selected(self, examples: list[Example], config: ExampleConfig) -> Examples:
        """Those that can be used, with decoded answers where `targets` and `unlabelled` ask for them."""
        wanted = [e for e in examples if not e.empty and (config.targets == "decoded" or not len(e.answer))]
        if config.unlabelled != "skip" and config.targets != "on_policy" and wanted:
            with self._at_work():
                found = decoded(self.backbone, wanted, config, self._cache, self.base, self.accelerator)
            asked = {e.id for e in wanted} & found.keys()
            examples = [e.answering(found[e.id]) if e.id in asked else e for e in examples]
        return select(examples, config, self.backbone.max_length)

    def _held_out(self, examples: list[Example]) -> Examples:
        """Those with a gold answer; only where there are none, with decoded answers. Too long ones are left out."""
        config = replace(self.examples_config, on_long="skip", targets="gold")
        labelled = select(examples, replace(config, unlabelled="skip"), self.backbone.max_length)
        return labelled if labelled.items or config.unlabelled == "skip" else self._selected(examples, config)

    def _check_examples(self) -> None:
        train, args, leads = self.train_dataset, self.args, self.is_world_process_zero()
        if not train.items:
            why = f"every question is left out: {train.reasons()}" if train.left_out() else "there are no questions"
            raise DataError(f"nothing to train on: {why}")
        if missing := sorted((self.objective.levels | self.objective.taught) - train.levels()):
            raise DataError(f"an edge or hard level needs x{missing[0]}, and the data have no such column")
        if not self.objective.active and not any(e.labelled or e.gold is not None for e in train.items):
            raise ConfigError("nothing is trained: no question has a gold answer, and no edge has gamma above 0")
        everything = [*train.items, *self.eval_dataset.items]
        pictured = [bool(example.images) for example in everything]
        if args.train_vision and not any(example.images for example in train.items):
            raise ConfigError("train_vision: no training example shows an image as pixels (images pixels)")
        together = self.accelerator.num_processes > 1 and (args.train_vision or self._sharded)
        if together and any(pictured) and not all(pictured):
            raise ConfigError(
                f"images pixels: {pictured.count(False)} of {len(pictured)} examples have no image, and several "
                "processes with train_vision or FSDP need one in each: use DDP and a frozen tower, or captions"
            )
        if self._sharded and any(pictured) and args.prefix_sharing:
            # whether a batch can share may differ from process to process, and each forward gathers weights
            raise ConfigError("images pixels: under FSDP set prefix_sharing false")
        check_vocabulary(self.model, max(example.largest_id for example in everything))
        if leads and train.left_out():
            print(f"left out of training: {train.reasons()}", file=sys.stderr)
        longest = max(example.longest for example in everything)
        answer = max(len(answer) for example in everything for answer in example.answers)
        memory_plan(self.model, args, longest, answer).check(self.accelerator.device, say=leads)

    @property
    def _cache(self) -> Cache:
        return Cache(self.args.cache or Path(self.args.output_dir) / "cache")

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The model on the device it is to be run on, and afterwards back where FSDP takes it from."""
        home = self.backbone.device
        if home != self.accelerator.device:
            self.model.to(self.accelerator.device)
        yield
        if home != self.accelerator.device:
            self.model.to(home)

    def get_train_dataloader(self) -> DataLoader:
        """Microbatches of this process; which samples a step has depends on seed and step alone."""
        args = self.args
        self._order = self._batches(self.train_dataset, args.batch_size, args.gradient_accumulation_steps)
        # under FSDP processes run as many passes, also where one has no sample with two answers
        on_policy = args.targets == "on_policy"
        two = any(e.gold is not None or (on_policy and e.labelled) for e in self.train_dataset.items)
        self._collate = partial(collate, always_graded=two and self._sharded)
        if on_policy:
            writer = Writer(self.backbone, self.examples_config, self.accelerator, args.temperature)
            self._student = StudentAnswers(writer, self._order, self.train_dataset.items)
        function = list if on_policy else self._collate
        workers = args.dataloader_num_workers
        return _Loader(self.train_dataset, batch_sampler=self._order, collate_fn=function, num_workers=workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Held-out microbatches of this process.

        Args:
            eval_dataset: rows as for training; None: those given to the trainer.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = rows if isinstance(rows, Examples) else self._held_out(self._tokenised(rows))
        if not len(examples):
            raise DataError("no held-out questions: give the trainer an eval_dataset")
        size = (self.args.per_device_eval_batch_size or 1) * self.accelerator.num_processes
        return DataLoader(examples, batch_sampler=self._batches(examples, size, 1, False), collate_fn=collate)

    def _batches(self, examples: Examples, size: int, pieces: int, shuffle: bool = True) -> Batches:
        state, args = self.accelerator, self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return Batches(len(examples), size, pieces, state.process_index, state.num_processes, seed, shuffle)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The microbatches of a step. Samples have been counted: each carries its weight in the mean over the batch."""
        return list(islice(epoch_iterator, num_batches)), None

    # the step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of one microbatch over the levels of the objective; gradients add up."""
        self._began = self._began or perf_counter()
        model.train()
        step = f"step {self.state.global_step + 1}"
        if self._student is not None:
            ask = partial(self._student.at, self.state.global_step, self.state.max_steps, self.model)
            answers = self._in_memory([example for example, _ in inputs], step, ask)
            inputs = self._collate([(e.answering(answers[e.id]), weight) for e, weight in inputs])
        batch = inputs.to(self.accelerator.device)
        total: Tensor = self._in_memory(batch.examples, step, partial(self._run, model, batch))
        if self.accelerator.sync_gradients:
            self._end_step()
        # transformers averages over processes, ours are shares of one global mean
        return total * self.accelerator.num_processes

    def _run(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """The loss, detached; the values of all samples are kept for the end of the step."""
        total = torch.zeros((), device=batch.targets.device)
        own = batch.weights > 0
        if self.accelerator.num_processes == 1 and not own.any():
            return total

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
        """Counts over all processes, and last the means of values by name if the first count is that of samples."""
        names = sorted({name for values in seen for name in values})
        sums = [torch.cat([values[name] for values in seen]).sum() for name in names]
        row = torch.tensor(counts, dtype=torch.float64, device=self.accelerator.device)
        numbers = self.accelerator.reduce(torch.cat([row, *(value[None] for value in sums)]), "sum").tolist()
        means = {name: value / (numbers[0] or 1) for name, value in zip(names, numbers[len(counts) :], strict=True)}
        return [*numbers[: len(counts)], means]

    @property
    def _sent(self) -> int:
        """The signal that this process was sent, in numbers that add up: SIGTERM counts for more than any SIGINTs."""
        return {0: 0, signal.SIGINT: 1}.get(self._signals.requested, 1 << 20)

    def _end_step(self) -> None:
        """Before the optimiser's step: the metrics of the batch; a loss that is not finite ends the run."""
        own = [example for examples, _ in self._seen for example in examples]
        levels = [level for step in self._passes for level in step.levels]
        levels += self._teachers.levels if isinstance(self._teachers, Ema) else ()
        hard = self.objective.hard_levels
        tokens = sum(e.tokens_under(levels) + (e.with_gold.tokens_under(hard) if e.with_gold else 0) for e in own)
        answers = sum(len(example.answer) for example in own)
        seen = [values for _, values in self._seen]
        n, tokens, answers, sent, means = self._reduced(seen, len(own), tokens, answers, self._sent)
        self._stop = _signal_of(sent)
        if not all(map(isfinite, means.values())):
            self._fail("the loss is not finite")
        seconds = perf_counter() - self._began
        self._row = {
            "step": self.state.global_step + 1,
            "kind": "train",
            **summary(self.objective, means),
            "lr": self._get_learning_rate(),
            "samples": int(n),
            "tokens": int(tokens),
            "answer_tokens": int(answers),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "memory_gib": peak_memory(self.accelerator.device),
        }

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = super()._get_grad_norm(model, grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not isfinite(value):
            self._fail("the gradient is not finite")
        self._row["grad_norm"] = value
        return value

    def _fail(self, what: str) -> NoReturn:
        """Save the state before the step, and name the questions whose values are not finite, or the whole batch."""
        bad: list[str] = []
        for examples, values in self._seen:
            finite = torch.stack([value.isfinite() for value in values.values()]).all(0).tolist()
            bad += [example.id for example, fine in zip(examples, finite, strict=True) if not fine]
        ids = gather_object(bad) or gather_object([example.id for examples, _ in self._seen for example in examples])
        self.model.zero_grad()
        step = self.state.global_step + 1
        raise ModelError(
            f"{what} in step {step}, questions {', '.join(ids)}; the state before it is saved in {self._save_now()}"
        )

    def _in_memory(self, examples: Sequence[Example], where: str, work: Callable[[], Any]) -> Any:
        """Do the work on some examples. Raises ModelError, which names them, where memory is short."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # outside of the handler: the error there holds the frames, and they hold what fills the memory
        self.model.zero_grad()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        # with other processes waiting in the middle of the step nothing can be gathered from them
        alone = self.accelerator.num_processes == 1 and self._wrapped is not None
        folder = self._save_now() if alone else newest(self.args.output_dir)
        raise ModelError(f"out of memory in {where}, {remedies(examples)}; the newest checkpoint is {folder}")

    # evaluation

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Held-out loss under the levels that the questions have, teachers live.

        Returns:
            Metrics with the prefix: `loss` (Eq. 7), `ce0`, `entropy0`, `dist01`, `jsd01`, …, means over questions.
        """
        examples: Any = dataloader.dataset
        module = self._wrapped or AlignmentModel(self.model, self.objective).to(self.accelerator.device)
        passes = (Pass(tuple(sorted(examples.levels())), False),)
        was_training = module.training
        module.eval()
        seen: list[dict[str, Tensor]] = []
        count = 0
        for batch in dataloader:
            batch = batch.to(self.accelerator.device)
            where = f"the held-out loss after step {self.state.global_step}"
            values = self._in_memory(batch.examples, where, partial(run, module, batch, passes, None))
            seen.append({name: value[batch.weights > 0] for name, value in values.items()})
            count += len(batch.own)
            if self.is_in_train and (sent := self._reduced([], self._sent)[0]):
                self._stop = _signal_of(sent)
                raise _Stopped
        module.train(was_training)
        n, means = self._reduced(seen, count)
        figures = summary(self.objective, means)
        metrics = {
            f"{metric_key_prefix}_{name}": value for name, value in {**figures, "loss": figures["total"]}.items()
        }
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=int(n))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The terms of the steps since the last line are averaged beside transformers' numbers."""
        if "loss" in logs and self._rows:
            names = [name for name, value in self._rows[-1].items() if isinstance(value, float) and name != "lr"]
            for name in names:
                logs.setdefault(name, sum(row[name] for row in self._rows) / len(self._rows))
            self._rows = []
        super().log(logs, start_time)

    # the run

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; or go on with a run.

        SIGTERM and Ctrl-C end the step under way on all processes, save, and raise SystemExit (143, 130).

        Args:
            resume_from_checkpoint: a checkpoint, or True: the newest whole one in `output_dir`, the start if there is
                none.

        Raises:
            ConfigError: the folder is in use or holds a run, or a resumed run differs from the one it goes on with.
            ModelError: no memory, a loss that is not finite, or a collapse with guard stop, after the state before it
                and the questions have been saved.
        """
        out, leads = Path(self.args.output_dir), self.is_world_process_zero()
        signals = Termination(signal.SIGTERM, signal.SIGINT)
        with RunFolder(out).held() if leads else nullcontext(), signals as self._signals:
            start = self._start(out, resume_from_checkpoint)
            self._teach()
            self.args.eval_on_start = start is None and self.args.eval_strategy != "no"
            try:
                result = super().train(str(start) if start else None, **kwargs)
            except _Stopped:
                self._save_now()
        if self.guard.collapse is not None:
            raise ModelError(f"{self.guard.collapse}; saved in {newest(out)}; {REMEDY}, or guard warn to continue")
        if self._stop and self.state.global_step < self.state.max_steps:
            if leads:
                step = f"step {self.state.global_step} of {self.state.max_steps}"
                print(f"stopped by {signal.Signals(self._stop).name} at {step}; resume to continue", file=sys.stderr)
            raise SystemExit(128 + self._stop)
        return result

    def _start(self, out: Path, resume: str | bool | None) -> Path | None:
        """The checkpoint to go on from; those that are not whole are removed."""
        leads = self.is_world_process_zero()
        broken = [folder for folder in checkpoints(out) if not is_whole(folder)]
        if broken and not (out / METRICS).is_file():
            # those of another trainer have no mark either, but their runs have no metrics of ours
            raise ConfigError(f"{broken[0]} is not a checkpoint of PRATrainer; choose another output_dir")
        self.accelerator.wait_for_everyone()
        for folder in broken if leads else ():
            print(f"warning: {folder} was not written to its end, and is removed", file=sys.stderr)
            shutil.rmtree(folder)
        if leads:
            (out / METRICS).touch()
        self.accelerator.wait_for_everyone()
        if not resume and checkpoints(out):
            raise ConfigError(f"{out} already holds a run; choose another output_dir, or resume it")
        start = newest(out) if resume is True else Path(resume) if resume else None
        step, self._kept = -1, self._settings()
        if start is not None:
            if not is_whole(start):
                raise ConfigError(f"{start}: not a checkpoint of PRATrainer, or not written to its end")
            saved = read_json(start / OURS)["settings"]
            if changed := sorted(name for name, value in self._kept.items() if saved.get(name) != value):
                raise ConfigError(f"{start} is of a run with other settings ({', '.join(changed)}); start a new run")
            step = int(start.name.rpartition("-")[2])
        if leads:
            # steps after the checkpoint are run again
            write_rows(out / METRICS, [row for row in read_metrics(out) if row["step"] <= step])
        return start

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must keep, as JSON values."""
        values = self.args.to_dict()
        ours = [field.name for kind in (Objective, ExampleConfig) for field in fields(kind) if field.name not in _FREE]
        kept = {name: values[name] for name in (*_KEPT, *ours)}
        kept |= {
            "sharded": self._sharded,
            "base model": self.base,
            "training examples": self.train_dataset.fingerprint(),
        }
        adapters = (getattr(self.model, "peft_config", None) or {}).get("default")
        parts = [getattr(adapters, name, None) for name in ("r", "lora_alpha", "target_modules")]
        kept["adapters"] = [sorted(part) if isinstance(part, set) else part for part in parts]
        settings: dict[str, Any] = json.loads(json.dumps(kept))
        return settings

    def _teach(self) -> None:
        """Targets of the model as it is before training, while it is."""
        if self.objective.teacher_model_kind == "base" and self.objective.taught and self.args.targets != "on_policy":
            module = AlignmentModel(self.model.eval(), self.objective)
            with self._at_work():
                self._teachers = BaseTargets(module, self.train_dataset.items, self.base, self._cache, self.accelerator)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        model = self.model
        # accelerate is to wrap the step, of which the model is a part
        self.model = self.model_wrapped = AlignmentModel(model, self.objective)
        try:
            wrapped, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        finally:
            self.model = model
        self.callback_handler.model = model
        self._wrapped = wrapped
        kind, on_policy = self.objective.teacher_model_kind, self.args.targets == "on_policy"
        if kind == "ema" or (kind == "base" and on_policy and self.objective.taught):
            # targets at answers that are not known yet cannot be cached: an average that never moves gives them
            decay = 1.0 if kind == "base" else self.objective.ema_decay
            self._teachers = Ema(model, decay, sorted(self.objective.taught), self.args.prefix_sharing)
        if resume_from_checkpoint is not None:
            if self._sharded:
                self._load_from_checkpoint(resume_from_checkpoint, model)
            folder = Path(resume_from_checkpoint)
            with read_from(folder):
                self._load_optimizer_and_scheduler(resume_from_checkpoint)
                self._load_scaler(resume_from_checkpoint)
            saved = read_json(folder / OURS)
            self.guard.restore(saved["guard"])
            if isinstance(self._teachers, Ema):
                self._teachers.restore(folder / EMA)
            if self._student is not None:
                self._student.restore(saved["answers"])
        return wrapped, loader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with read_from(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with read_from(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)

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

    # files

    def _save_now(self) -> Path:
        """The checkpoint of the present step, written unless it is there."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if not is_whole(folder):
            self._save_checkpoint(self.model, None)
        return folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        out, args = Path(self.args.output_dir), self.args
        folder = out / f"checkpoint-{self.state.global_step}"
        # older ones stay until this one is whole
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        except (SafetensorError, RuntimeError, OSError) as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{folder}: cannot be written ({reason}); make room there: the checkpoints before it are as they were"
            ) from None
        finally:
            args.save_total_limit = limit
        if isinstance(self._teachers, Ema):
            self._teachers.save(folder / EMA, args.should_save)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            answers = {} if self._student is None else self._student.state(self.state.global_step)
            ours = {"settings": self._kept, "guard": self.guard.state(), "answers": answers}
            write_json(folder / OURS, {"base_fingerprint": self.base, **ours})
            (folder / COMPLETE).touch()
            best = self.state.best_model_checkpoint
            aside = best is not None and limit is not None and Path(best) not in checkpoints(out)[-limit:]
            keep = None if limit is None else limit + aside
            rotate_checkpoints(str(out), save_total_limit=keep, best_model_checkpoint=best, use_mtime=False)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with without_loading_bars():
            super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save and folder.is_dir():
            (folder / "training_args.bin").unlink(missing_ok=True)
            for file in folder.glob("*.safetensors"):
                file.chmod((folder / "config.json").stat().st_mode if (folder / "config.json").exists() else 0o644)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: a step reads several prompts; `tokens` in the metrics counts what it reads."""
        return 0


def _signal_of(sent: float) -> int:
    """The signal that some process was sent, by the sum of `_sent`; 0: none."""
    return (signal.SIGTERM if sent >= 1 << 20 else signal.SIGINT) if sent else 0


class _Stopped(Exception):
    """A signal came during a measurement."""


class _Loader(DataLoader):  # type: ignore[type-arg]
    """transformers tells it the epoch, of which the order is a function."""

    def set_epoch(self, epoch: int) -> None:
        order: Any = self.batch_sampler
        order.set_epoch(epoch)


class _Flow(TrainerCallback):
    """What happens between steps: rows of metrics, averages of weights, signals, and the best checkpoint."""

    def __init__(self, trainer: PRATrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer._teachers, Ema):
            self.trainer._teachers.update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if state.is_world_process_zero:
            record(args.output_dir, trainer._row)
        trainer._rows.append(trainer._row)
        trainer._seen, trainer._began = [], 0.0
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True
        if trainer._stop:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = {name.removeprefix("eval_"): value for name, value in kwargs["metrics"].items()}
        name = args.metric_for_best_model
        saves = args.save_strategy != "no" and state.global_step > 0
        if name and saves and metrics[name] < (state.best_metric or float("inf")):
            control.should_save = True
        if state.is_world_process_zero and self.trainer.is_in_train:
            row = {"step": state.global_step, "kind": "eval", "split": self.trainer.eval_split, **metrics}
            row |= {"samples": len(self.trainer.eval_dataset), "seconds": metrics["runtime"]}
            record(args.output_dir, {name: value for name, value in row.items() if name not in _OF_TRANSFORMERS})
