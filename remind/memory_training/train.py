"""`remind train-memory`: a policy, what it is trained on, the run, and what it remembers at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remind.alignment.model import trainable
from remind.core import optional
from remind.core.errors import ModelError
from remind.core.files import atomic_folder, none_empty, write_json
from remind.core.progress import without_loading_bars
from remind.core.run_folder import REPORT, RunFolder
from remind.llm.ledger import table
from remind.memory_training import pico, salimory
from remind.memory_training.config import STAGES, TrainMemoryConfig
from remind.memory_training.dialogues import SaliMoryDialoguesTask, Source, imitated
from remind.memory_training.evaluate import greedy, mean, remembered
from remind.memory_training.membuilder import MemBuilderTask
from remind.memory_training.salimory import SaliMoryTask
from remind.memory_training.trainer import RL, EpisodeTrainer, PolicyTrainer, arguments
from remind.models.backbone import Backbone, backbone_of, describe, load_backbone
from remind.testbed.memory_world import Expert, make_life

POLICY = "policy"


def train_memory(cfg: TrainMemoryConfig, task: Callable[..., Any] | None = None) -> Path:
    """Train a policy, or go on with it; prints what it remembers at the end.

    After SIGTERM or Ctrl-C the generation under way is ended and saved, and SystemExit raised with status 143 or 130.

    Args:
        task: of adrpo in place of MemBuilder's; made from the lessons, the tokenizer, `reward` and `rl`.

    Returns:
        The run folder.

    Raises:
        ConfigError: the folder holds a run and resume is off, or one with other settings; settings that do not fit.
        DataError: dialogues that cannot be used.
        ModelError: a policy, checkpoint or endpoint that cannot be used, or vLLM or TRL is missing.
    """
    out = Path(cfg.out)
    RunFolder(out).check(cfg.resume)
    if cfg.rl.vllm != "off":
        optional("vllm", f"rl.vllm {cfg.rl.vllm}")
    with none_empty(out):
        args, policy = arguments(cfg), _policy(cfg)
        source = None if cfg.data is None else Source(cfg.data, cfg.llm, STAGES[cfg.method])
        with args.main_process_first():  # the others take the expert's replies from the cache
            material = _material(cfg, policy, source, task or MemBuilderTask)
        trainer = (EpisodeTrainer if cfg.method in RL else PolicyTrainer)(policy, material, cfg, args)
    if source is not None:
        source.replied = trainer.replied
    trainer.train(resume_from_checkpoint=cfg.resume)
    if trainer.is_world_process_zero():
        _finish(cfg, policy, source)
    return out


def _policy(cfg: TrainMemoryConfig) -> Backbone:
    """The policy, with adapters where they are asked for. ModelError where it cannot be one."""
    if cfg.model == "pico":
        policy = backbone_of(*pico.make_pico(cfg.seed), "pico")
    else:
        known = describe(cfg.model)
        if known.kind == "encoder":
            raise ModelError(f"{cfg.model}: not a causal language model, which a policy must be")
        if not isinstance(pico.speech_of(known.tokenizer), pico.Chat) and cfg.data is not None:
            raise ModelError(
                f"{cfg.model}: knows the words of the memory world only; dialogues need an instruction model"
            )
        policy = load_backbone(cfg.model, cfg.dtype)
    if policy.tokenizer.pad_token is None:
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
    torch.manual_seed(cfg.seed)  # of the adapters' first values
    return replace(policy, model=trainable(policy.model, cfg.lora))


def _material(cfg: TrainMemoryConfig, policy: Backbone, source: Source | None, task: Callable[..., Any]) -> Any:
    """What a policy is trained on, from the memory world or a source: a task, or prompts and replies as token ids."""
    speech, world, turns = pico.speech_of(policy.tokenizer), cfg.world, cfg.salimory.turns
    lives = (make_life(world.seed, number, world.sessions) for number in range(world.dialogues))
    expert = Expert()
    found: Iterable[tuple[Any, str]]
    if cfg.method == "salimory":
        if source is not None:
            return SaliMoryDialoguesTask(source, policy.tokenizer, cfg.salimory)
        windows = [one for life in lives for one in salimory.windows(life, turns)]
        return SaliMoryTask(windows, policy.tokenizer, cfg.salimory)
    if cfg.method == "salimory_sft":
        settings = expert, turns, world.seed, speech.limits
        found = (pair for life in lives for pair in salimory.lessons(life, *settings))
        if source is not None:
            found = imitated(source, turns)
    else:
        if source is None:
            lessons = [one for life in lives for one in pico.lessons(life, expert, world.seed, speech.limits[0])]
        else:
            longest = policy.max_length - (cfg.rl.reply_tokens or speech.room)
            lessons = source.lessons(lambda view: len(speech.prompt(view)), longest)
        if cfg.method == "adrpo":
            return task(lessons, policy.tokenizer, cfg.reward, cfg.rl)
        found = (pair for one in lessons for pair in one.examples)
    return [(speech.prompt(shown), speech.target(shown, reply)) for shown, reply in found]


def _finish(cfg: TrainMemoryConfig, policy: Backbone, source: Source | None) -> None:
    """The policy as a plain folder, and what it remembers of dialogues that it has never seen."""
    out, speech = Path(cfg.out), pico.speech_of(policy.tokenizer)
    model = policy.model.merge_and_unload(safe_merge=True) if cfg.lora else policy.model
    model.config.use_cache = True
    with atomic_folder(out / POLICY) as folder, without_loading_bars():
        model.save_pretrained(folder)
        (policy.processor or policy.tokenizer).save_pretrained(folder)
    if source is not None:
        print(table(source.chats.ledger.summary()))
        print(f"policy: {out / POLICY}; for remind run-memory: --llm.memory.base_url local --llm.memory.model")
        return
    world = cfg.world
    lives = [make_life(world.seed, -1 - number, world.sessions) for number in range(world.evaluate)]
    answer = greedy(model, policy.tokenizer, cfg.rl.reply_tokens or speech.room)
    report = mean(remembered(cfg.method, answer, lives, speech))
    write_json(out / REPORT, report)
    print(" ".join(f"{name} {value:.3f}" for name, value in report.items()) + f"; policy: {out / POLICY}")
