"""`remind train-memory`: a run folder, TRL's trainers for what is in it, and the policy at the end."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from remind.alignment.metrics import METRICS, read_metrics
from remind.alignment.model import trainable
from remind.core import optional
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import atomic_folder, write_json, write_text
from remind.core.processes import TERMINATED, Termination
from remind.core.progress import ProgressBar
from remind.core.run_folder import REPORT, RunFolder
from remind.llm.ledger import table
from remind.memory_training import checkpoint
from remind.memory_training.config import STAGES, Method, TrainMemoryConfig
from remind.memory_training.dialogues import Source
from remind.memory_training.episodes import Task
from remind.memory_training.evaluate import Answerer, BankReport, Report, evaluate, evaluate_bank, greedy, mean
from remind.memory_training.membuilder import Lesson, MemBuilderTask
from remind.memory_training.pico import lessons, write_pico
from remind.memory_training.salimory import SaliMoryTask, windows
from remind.memory_training.salimory import lessons as salimory_lessons
from remind.memory_training.salimory_dialogues import SaliMoryDialoguesTask, imitated
from remind.memory_training.speech import Chat, Commands, speech_of
from remind.models.backbone import Backbone, describe, load_backbone
from remind.testbed.memory_world import Expert, Life, make_life

POLICY, START = "policy", "start"
#: Settings that may change when a run is resumed.
FREE = frozenset({"out", "resume", "save_every", "keep_last", "rl.micro_groups", "world.evaluate", "llm.cache"})


def train_memory(cfg: TrainMemoryConfig, task: Callable[..., Task] | None = None) -> Path:
    """Train a policy, or go on with it; prints what it remembers at the end.

    After SIGTERM the step under way is ended and saved, and SystemExit raised with status 143.

    Args:
        task: of adrpo in place of MemBuilder's; made from the lessons, the tokenizer, the reward settings and alpha.

    Returns:
        The run folder.

    Raises:
        ConfigError: the folder holds a run and resume is off, or one with other settings; settings that do not fit;
            vLLM where it cannot run.
        DataError: dialogues that cannot be used.
        ModelError: a policy, checkpoint or endpoint that cannot be used, or TRL is missing.
    """
    optional("trl", "train-memory")
    if cfg.rl.vllm != "off":
        _check_vllm(cfg.rl.vllm)
    # what is wrong with them is said before there is a folder
    policy = None if cfg.model == "pico" else _loaded(cfg.model, cfg)
    source = None if cfg.data is None else Source(cfg.data, cfg.llm, STAGES[cfg.method])
    out = Path(cfg.out)
    main = _rank() == 0
    with RunFolder(out).held() if main else nullcontext(), Termination() as termination:
        if main:
            RunFolder(out).claim(cfg, cfg.resume, FREE)
            if cfg.model == "pico" and not (out / START).is_dir():
                write_pico(out / START, cfg.seed)
        # the others read what it has written
        _joined().wait_for_everyone()
        start = checkpoint.newest(out, report=main)
        run = _Run(cfg, out, policy or _loaded(str(out / START), cfg), start, termination, task, source)
        if run.done < cfg.steps:
            run.train()
        if termination.requested and run.done < cfg.steps:
            raise SystemExit(TERMINATED)
        if main:
            run.finish()
    return out


def _loaded(name: str, cfg: TrainMemoryConfig) -> Backbone:
    """The policy, with adapters where they are asked for. ModelError where it cannot be one."""
    known = describe(name)
    if known.kind != "causal":
        raise ModelError(f"{name}: not a causal language model, which a policy must be")
    if not isinstance(speech_of(known.tokenizer), Chat) and cfg.data is not None:
        raise ModelError(f"{name}: knows the words of the memory world only; dialogues need an instruction model")
    policy = load_backbone(name, cfg.dtype)
    if policy.tokenizer.pad_token is None:
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
    torch.manual_seed(cfg.seed)  # of the adapters' first values
    return replace(policy, model=trainable(policy.model, cfg.lora)) if cfg.lora else policy


def _check_vllm(mode: str) -> None:
    """ConfigError where TRL could not sample with vLLM."""
    if not torch.cuda.is_available():
        raise ConfigError(f"rl.vllm {mode}: vLLM samples on a GPU, and there is none; leave it off")
    if not import_module("trl.import_utils").is_vllm_available():
        raise ConfigError(f"rl.vllm {mode}: needs the package vllm, which is not installed; TRL takes 0.22 to 0.31")


def _joined() -> Any:
    """`accelerate.PartialState`. ConfigError where launched processes did not join."""
    from accelerate import PartialState

    # without it, processes on a machine without a GPU would each train alone
    state = PartialState(cpu=_on_cpu())
    if int(os.environ.get("WORLD_SIZE", "1")) != state.num_processes:
        raise ConfigError("launched as processes that did not connect; see configs/accelerate/cpu_2.yaml")
    return state


def _rank() -> int:
    return int(_joined().process_index)


def _on_cpu() -> bool:
    return torch.accelerator.current_accelerator(check_available=True) is None


class _Run:
    """One run. `done` counts finished steps; of reinforcement learning a step is a generation."""

    def __init__(
        self,
        cfg: TrainMemoryConfig,
        out: Path,
        policy: Backbone,
        start: Path | None,
        termination: Termination,
        task: Callable[..., Task] | None,
        source: Source | None,
    ) -> None:
        self.cfg, self.out, self.termination, self.make_task, self.source = cfg, out, termination, task, source
        self.done = checkpoint.step_of(start)
        self.imitates, self.salimory = cfg.method in ("sft", "salimory_sft"), cfg.method.startswith("salimory")
        self.updates = 1 if self.imitates else cfg.rl.inner_epochs
        self.model, self.tokenizer, self.speech = policy.model, policy.tokenizer, speech_of(policy.tokenizer)
        self.room = cfg.rl.reply_tokens or self.speech.room
        self.optimizer = checkpoint.make_optimizer(self.model, cfg.lr, cfg.weight_decay)
        if start is not None:
            checkpoint.restore(start, self.model, self.optimizer)
            print(f"resuming from {start}", file=sys.stderr)
        if _rank() == 0 and (out / METRICS).is_file():
            kept = [row for row in read_metrics(out) if row["step"] <= self.done * self.updates]
            write_text(out / METRICS, "".join(f"{json.dumps(row)}\n" for row in kept))
        self.expert = Expert(cfg.world.blind, cfg.world.missed, cfg.world.kept, cfg.world.blurred)

    def train(self) -> None:
        cfg = self.cfg
        total = cfg.steps * self.updates
        offset = self.done * self.updates
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: checkpoint.rate(n + offset, total, cfg.warmup, cfg.schedule)
        )
        material = [*self.replies()] if self.imitates else self.task()
        with ProgressBar("train-memory", total, offset) as bar, warnings.catch_warnings():
            # trl still asks by the old name, which is nothing that a user could change
            warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
            callbacks = [_Recorder(self, bar)]
            trainer = (self._sft if self.imitates else self._grpo)(material, callbacks, (self.optimizer, schedule))
            # every number goes into metrics.jsonl
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    def lives(self) -> Iterator[Life]:
        """The training dialogues."""
        world = self.cfg.world
        return (make_life(world.seed, number, world.sessions) for number in range(world.dialogues))

    def lessons(self) -> Sequence[Lesson]:
        """Sessions with the memories and replies of MemBuilder's expert."""
        if self.source is not None:
            # the others take the expert's replies from the cache
            with _joined().main_process_first():
                longest = self.model.config.max_position_embeddings - self.room
                return self.source.lessons(lambda view: len(self.speech.prompt(view)), longest)
        seed, most = self.cfg.world.seed, self.speech.limits[0]
        return [one for life in self.lives() for one in lessons(life, self.expert, seed, most)]

    def replies(self) -> Iterator[tuple[list[int], list[int]]]:
        """Token ids of prompts, and of what the expert replies."""
        found: Iterable[tuple[Any, str]]
        if self.salimory and self.source is not None:
            with _joined().main_process_first():
                found = list(imitated(self.source, self.cfg.salimory.turns))
        elif self.salimory:
            settings = self.expert, self.cfg.salimory.turns, self.cfg.world.seed, self.speech.limits
            found = (one for life in self.lives() for one in salimory_lessons(life, *settings))
        else:
            found = (pair for one in self.lessons() for pair in one.examples)
        yield from ((self.speech.prompt(shown), self.speech.target(shown, reply)) for shown, reply in found)

    def task(self) -> Task:
        """Of reinforcement learning."""
        cfg = self.cfg
        if not self.salimory:
            make = self.make_task or MemBuilderTask
            return make(self.lessons(), self.tokenizer, cfg.reward, cfg.rl.alpha)
        if self.source is not None:
            return SaliMoryDialoguesTask(self.source, self.tokenizer, cfg.salimory)
        rows = [one for life in self.lives() for one in windows(life, cfg.salimory.turns)]
        return SaliMoryTask(rows, self.tokenizer, cfg.salimory)

    def rows(self, count: int) -> list[int]:
        """Row numbers of the remaining steps: a permutation an epoch, a function of the seed."""
        if not count:
            raise DataError("there is nothing to train on: no reply of the expert could be used, or no question")
        needed, order = self.cfg.steps * self.cfg.batch_size, list[int]()
        for epoch in range(-(-needed // count)):
            order += Random(f"order {self.cfg.seed} {epoch}").sample(range(count), count)
        return order[self.done * self.cfg.batch_size : needed]

    def _sft(self, replies: Any, callbacks: list[Any], optimizers: Any) -> Any:
        from datasets import Dataset

        trl = optional("trl", "train-memory")
        examples = [
            {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target} for prompt, target in replies
        ]
        rows = self.rows(len(examples))
        args = trl.SFTConfig(
            **self._arguments(),
            max_steps=self.cfg.steps - self.done,
            per_device_train_batch_size=self.cfg.batch_size // self._processes(),
            train_sampling_strategy="sequential",
            max_length=None,
        )

        class Trainer(trl.SFTTrainer):  # type: ignore[misc, name-defined]
            def _send_telemetry(self) -> None:
                """TRL would tell its makers that a trainer was built."""

        return Trainer(
            model=self.model,
            args=args,
            train_dataset=Dataset.from_list([examples[row] for row in rows]),
            processing_class=self.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def _grpo(self, task: Any, callbacks: list[Any], optimizers: Any) -> Any:
        from remind.memory_training.trainer import MemoryGRPOTrainer, Settings, grpo_arguments

        cfg, rl = self.cfg, self.cfg.rl
        passes, rest = divmod(cfg.batch_size, rl.micro_groups * self._processes())
        if rest:
            raise ConfigError(
                f"batch_size {cfg.batch_size} is not a multiple of rl.micro_groups {rl.micro_groups} times "
                f"{self._processes()} processes"
            )
        changes = self._arguments()
        args = grpo_arguments(
            changes.pop("output_dir"),
            changes.pop("seed"),
            **changes,
            max_steps=(cfg.steps - self.done) * self.updates,
            per_device_train_batch_size=rl.micro_groups * rl.group,
            steps_per_generation=passes,
            gradient_accumulation_steps=passes,
            num_generations=rl.group,
            num_iterations=rl.inner_epochs,
            max_completion_length=self.room,
            temperature=rl.temperature,
            top_p=rl.top_p,
            beta=rl.beta,
            use_vllm=rl.vllm != "off",
            vllm_mode="colocate" if rl.vllm == "off" else rl.vllm,
            vllm_server_base_url=rl.vllm_server,
            vllm_gpu_memory_utilization=rl.vllm_memory,
        )
        contrast = {"booster": cfg.salimory.boost, "utilizer": cfg.salimory.utilize}
        settings = Settings(
            rl.clip, rl.weighting, rl.scale_rewards, contrast, cfg.salimory.contrast_scale, kl_stop=rl.kl_stop
        )
        rows = self.rows(len(task))
        return MemoryGRPOTrainer(
            task, rows, settings, self.model, self.tokenizer, args, self.done, callbacks, optimizers
        )

    def _processes(self) -> int:
        return int(_joined().num_processes)

    def _arguments(self) -> dict[str, Any]:
        return {
            "output_dir": str(self.out / ".trl"),
            "seed": self.cfg.seed,
            "max_grad_norm": self.cfg.max_grad_norm,
            "use_cpu": _on_cpu(),
            "report_to": [],
            "save_strategy": "no",
            "bf16": False,
            "gradient_checkpointing": self.cfg.gradient_checkpointing,
            "disable_tqdm": True,
            "logging_steps": 1,
            "logging_strategy": "steps",
            "dataloader_pin_memory": False,
        }

    def save(self, step: int) -> None:
        self.done = step
        if _rank() == 0:
            checkpoint.save(self.out, step, self.model, self.optimizer, self.cfg.keep_last)

    def finish(self) -> None:
        """The policy as a plain folder, and what it remembers of dialogues that it has never seen."""
        model = self.model.merge_and_unload(safe_merge=True) if self.cfg.lora else self.model
        model.config.use_cache = True
        with atomic_folder(self.out / POLICY) as folder:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        if self.source is not None:
            print(table(self.source.chats.ledger.summary()))
            print(f"policy: {self.out / POLICY}; for remind run-memory: --llm.memory.base_url local --llm.memory.model")
            return
        world = self.cfg.world
        lives = [make_life(world.seed, -1 - number, world.sessions) for number in range(world.evaluate)]
        answer = greedy(model, self.tokenizer, self.room)
        report = mean(remembered(self.cfg.method, answer, lives, self.speech))
        write_json(self.out / REPORT, report)
        print(" ".join(f"{name} {value:.3f}" for name, value in report.items()) + f"; policy: {self.out / POLICY}")


def remembered(
    method: Method, answer: Answerer, lives: Iterable[Life], speech: type[Commands] | Commands = Commands
) -> Sequence[Report | BankReport]:
    """A report of each dialogue, by the roles that a method trains."""
    limits = speech.limits
    return evaluate_bank(answer, lives, limits) if method.startswith("salimory") else evaluate(answer, lives, limits[0])


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Metrics after every step, checkpoints between generations, and the end where it was asked for."""

    def __init__(self, run: _Run, bar: ProgressBar) -> None:
        self.run, self.bar = run, bar
        self.offset, self.clock = run.done * run.updates, (perf_counter(), process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        run, step = self.run, self.offset + state.global_step
        now = perf_counter(), process_time()
        times = {"seconds": now[0] - self.clock[0], "cpu_seconds": now[1] - self.clock[1]}
        self.clock = now
        # epoch and num_tokens count from where this process began
        left_out = {"epoch", "num_tokens"}
        numbers = {name: v for name, v in logs.items() if isinstance(v, int | float) and name not in left_out}
        if _rank() == 0:
            with checkpoint.saving(run.out / METRICS), (run.out / METRICS).open("a") as file:
                file.write(f"{json.dumps({'kind': 'train', 'step': step, **numbers, **times})}\n")
        self.bar.step(note=f"loss {logs['loss']:.3f}")
        if step % run.updates:
            return
        generation, stop = step // run.updates, run.termination.requested
        if stop or generation % run.cfg.save_every == 0 or generation == run.cfg.steps:
            run.save(generation)
        control.should_training_stop = control.should_training_stop or stop
