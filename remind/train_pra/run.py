"""`remind train-pra`: states in, a run folder out; and what a run has learned, read back from its folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from safetensors import SafetensorError
from transformers import BitsAndBytesConfig, PrinterCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from remind.alignment.arguments import PRAConfig
from remind.alignment.metrics import checkpoints, kept
from remind.alignment.model import add_marker, fingerprint, marker_id, opened, trainable
from remind.alignment.trainer import PRATrainer
from remind.core import optional
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import none_empty, read_json, sha256_file, write_json
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder
from remind.models import BUILT_IN
from remind.models.backbone import Backbone, load_backbone
from remind.states.dataset import MANIFEST, check_split, load_states, read_manifest
from remind.train_pra.config import DATA, TrainConfig


def train(
    cfg: TrainConfig,
    *callbacks: TrainerCallback,
    before: Callable[[TrainConfig, PRATrainer], dict[str, Any] | None] | None = None,
) -> Path:
    """Train on a states folder, or resume training; prints where the result is.

    Args:
        before: asked by the first process before the first step; data.json keeps what it gives, as `check`.

    Returns:
        The run folder: config.yaml, data.json, metrics.jsonl and checkpoints.

    Raises:
        ConfigError, DataError, ModelError: as `PRATrainer` and its `train`.
    """
    trainer = make_trainer(cfg, *callbacks)
    if before is not None and trainer.is_world_process_zero():
        about = Path(cfg.out) / DATA
        resumed = cfg.resume and checkpoints(cfg.out) and about.is_file()
        trainer.check = read_json(about).get("check") if resumed else before(cfg, trainer)
    trainer.train(resume_from_checkpoint=cfg.resume)
    if trainer.is_world_process_zero():
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        print(f"{trainer.state.global_step} steps, {trained:,} trained parameters; the run is in {cfg.out}")
    return Path(cfg.out)


def make_trainer(cfg: TrainConfig, *callbacks: TrainerCallback) -> PRATrainer:
    """The trainer of these settings, which writes config.yaml and data.json when it begins. Raises as `PRATrainer`."""
    cfg = _resolved(cfg)
    out = Path(cfg.out)
    RunFolder(out).check(cfg.resume)
    states = _splits(cfg)  # before the model is loaded, which takes long
    monitored = cfg.data.eval_split if cfg.data.eval_split in states else None
    quantization = None if cfg.quantise is None else nf4(cfg.dtype)
    with none_empty(out):
        args = arguments_of(cfg, chooses=monitored not in (None, "test"))
        trainer = PRATrainer(
            cfg.model,
            args,
            train_dataset=islice(states["train"], cfg.data.limit),
            eval_dataset=islice(states[monitored], cfg.data.eval_limit) if monitored else None,
            peft_config=cfg.lora,
            quantization_config=quantization,
            callbacks=callbacks,
        )
    for kind in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(kind)
    trainer.eval_split = monitored or cfg.data.eval_split
    trainer.add_callback(_OfTheCommand(cfg, trainer))
    if trainer.is_world_process_zero() and monitored:
        print(f"held-out loss: {len(trainer.eval_dataset)} questions of split {monitored}", file=sys.stderr)
    elif trainer.is_world_process_zero():
        print(
            f"warning: no questions of split {cfg.data.eval_split} for a held-out loss, so that no collapse is noticed "
            "and no best checkpoint chosen; build states with such a split, or name another one as data.eval_split",
            file=sys.stderr,
        )
    return trainer


def arguments_of(cfg: TrainConfig, chooses: bool = True) -> PRAConfig:
    """The settings as a `PRAConfig`.

    Args:
        chooses: whether the held-out loss may choose a best checkpoint: that of the test split must not.
    """
    best: dict[str, Any] = {} if chooses else {"metric_for_best_model": None}
    try:
        return PRAConfig(**{**cfg.arguments(), **best})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"trainer: {' '.join(str(error).split())}") from None


def nf4(dtype: str) -> BitsAndBytesConfig:
    """A quantization config that puts the language model's blocks in NF4, as QLoRA trains adapters on them.

    Embeddings, head, norms and vision tower stay as they are. Raises ModelError: no bitsandbytes.
    """
    optional("bitsandbytes", "A model in 4 bits")
    # patterns from the start of a layer's name: what is in no block, or in the vision tower
    kept = [r"(?!.*\.(layers|h)\.\d).*", r".*vis(ual|ion)"]
    precision = getattr(torch, dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=precision, llm_int8_skip_modules=kept
    )


class _OfTheCommand(TrainerCallback):
    """The bar on the screen; and settings and data of a run, written when it has the folder to itself."""

    def __init__(self, cfg: TrainConfig, trainer: PRATrainer) -> None:
        self.cfg, self.trainer = cfg, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.step(note=f"loss {self.trainer._rows[-1]['total']:.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = ProgressBar("train", state.max_steps, state.global_step)
        if not state.is_world_process_zero:
            return
        out, cfg, trainer = Path(self.cfg.out), self.cfg, self.trainer
        RunFolder(out).write(cfg)
        train, held_out = trainer.train_dataset, trainer.eval_dataset
        about: dict[str, Any] = {
            "states": cfg.states,
            "manifest_sha256": sha256_file(Path(cfg.states) / MANIFEST),
            "inputs": read_manifest(cfg.states).get("inputs", {}),
            "tokens_sha256": train.fingerprint(),
            "train": {"examples": len(train), "labelled": train.labelled(), "left_out": train.left_out},
            "held_out": {"examples": len(held_out), "split": trainer.eval_split if len(held_out) else None},
            "base_model": cfg.model,
            "base_fingerprint": trainer.base,
            "steps": state.max_steps,
            "check": trainer.check,
        }
        if trainer.shown is not None:
            files = [image for item in (*train.items, *held_out.items) for image in item.images]
            about["images"] = {"shown": len(files), "files": len(set(files)), "most_tokens": trainer.shown.most}
        write_json(out / DATA, about)


def _splits(cfg: TrainConfig) -> DatasetDict:
    """The states. Raises DataError where there is nothing to train on, or train and test share evidence."""
    check_split(cfg.states)
    states = load_states(cfg.states)
    if "train" not in states:
        there = f"all are of split {' or '.join(sorted(states))}" if states else "there are no questions"
        hint = "give the dialogue file questions of split train (docs/data.md), and build the states again"
        raise DataError(f"nothing to train on: {there}; {hint}", cfg.states)
    return states


def _resolved(cfg: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run folder can be read from anywhere."""
    if not cfg.states or not cfg.out or not cfg.model:
        raise ConfigError("states, model and out must be given")
    local = cfg.model not in BUILT_IN and Path(cfg.model).exists()
    model = str(Path(cfg.model).resolve()) if local else cfg.model
    if cfg.data.image_root is not None:
        cfg = replace(cfg, data=replace(cfg.data, image_root=str(Path(cfg.data.image_root).expanduser().resolve())))
    return replace(cfg, states=str(Path(cfg.states).resolve()), out=str(Path(cfg.out).resolve()), model=model)


# what a run has learned


def restored(cfg: TrainConfig, folder: Path) -> tuple[Backbone, Any]:
    """The base model of a run, and as it was trained, with the weights of a checkpoint.

    Raises:
        ModelError: another base model than the run's, or a damaged checkpoint.
    """
    if cfg.lora is None:
        backbone = load_backbone(folder, cfg.dtype)
        return backbone, backbone.model
    backbone = opened(cfg.model, None, cfg.dtype, "cpu", None if cfg.quantise is None else nf4(cfg.dtype))
    if cfg.data.marker_token:
        add_marker(backbone)
    if fingerprint(backbone.model) != (kept(folder) or {}).get("base_fingerprint"):
        raise ModelError(f"{cfg.model} is not the model that {cfg.out} was trained from; give it as base")
    return backbone, with_adapters(backbone, cfg, folder)


def with_adapters(backbone: Backbone, cfg: TrainConfig, folder: Path) -> Any:
    """The base model with the adapters of a checkpoint."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    marker = marker_id(backbone.tokenizer) if cfg.data.marker_token else None
    model: Any = trainable(backbone.model, cfg.lora, cfg.data.train_vision, marker)
    try:
        weights = load_file(folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise ModelError(f"{folder}: its adapters cannot be read: {error}") from None
    if odd := sorted(weights.keys() ^ get_peft_model_state_dict(model).keys()):
        raise ModelError(f"{folder}: its adapters are not those of the model; the first that differs is {odd[0]}")
    set_peft_model_state_dict(model, weights)
    return model
