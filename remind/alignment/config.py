"""What a training run is told: one dataclass per component, as they stand in `configs/pra_*.yaml`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from remind.alignment.data import DataConfig
from remind.alignment.guard import GuardConfig
from remind.alignment.losses import Edge, Objective
from remind.alignment.optim import OptimizerKind, Schedule
from remind.alignment.step import StepKind, plan
from remind.alignment.teachers import TeacherConfig
from remind.core.errors import ConfigError
from remind.core.files import write_text

CONFIG = "config.yaml"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the language model; everything else stays as it is.

    There is no dropout: with it, equal contexts would have unequal distributions.
    """

    r: int = 64
    """Rank."""
    alpha: int = 128
    """Scale: an adapter's product is multiplied by alpha / r."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.r < 1 or self.alpha < 1 or not self.target_modules:
            raise ConfigError("lora needs r and alpha of 1 or more and at least one target module")


@dataclass(frozen=True)
class TrainerConfig:
    """The loop: steps, learning rate, what is watched and what is saved."""

    lr: float = 1e-5
    """Peak learning rate of AdamW."""
    optimizer: OptimizerKind = "adamw"
    """adamw: moments as precise as the weights. adamw8bit: moments of 8 bits (two bytes a weight in all); weights in
    bfloat16 are then rounded stochastically, so that they move at small learning rates too."""
    epochs: int = 1
    """Passes over the training examples."""
    max_steps: int | None = None
    """Optimiser steps; overrides epochs."""
    batch_size: int = 2
    """Samples per optimiser step, over all processes together."""
    gradient_accumulation: int = 1
    """Microbatches into which each process cuts its share of the batch. Changes memory, not the result."""
    warmup: float = 0.03
    """Share of the steps over which the learning rate rises from 0."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: cosine to 0, or constant."""
    clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    weight_decay: float = 0.0
    """AdamW's decay of matrices; norms, biases and embeddings have none."""
    step: StepKind = "sequential"
    """sequential: one level's graph lives at a time. joint: all at once (needed for target_grad flow)."""
    prefix_sharing: bool = True
    """Compute what x1 and x2 have in common once, where x2 only teaches. Changes time, not the result beyond rounding;
    needs sdpa or flash attention without sliding windows."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    eval_every: int = 50
    """Steps between measurements of the held-out loss, from before the first step on; 0: only at the end."""
    eval_split: str = "dev"
    """Split for the held-out loss. Where the states have none, test is watched instead, and then no best checkpoint is
    chosen: a choice by test loss would spoil the test."""
    eval_limit: int | None = 64
    """At most this many held-out questions, the first ones; None: all."""
    save_every: int = 100
    """Steps between checkpoints; one is always written at the end."""
    keep_last: int = 2
    """Newest checkpoints that are kept, besides the best one."""
    trackers: tuple[str, ...] = ()
    """Trackers of accelerate to report to as well, e.g. tensorboard; metrics.jsonl is always written. One that fails is
    left out with a warning."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What counts as a collapse at a measurement of the held-out loss, and what then happens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trackers", tuple(self.trackers))
        counts = ("epochs", "max_steps", "batch_size", "gradient_accumulation", "eval_limit", "save_every", "keep_last")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        for name in ("lr", "warmup", "clip", "weight_decay", "eval_every"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.warmup > 1:
            raise ConfigError(f"warmup is {self.warmup}; it is a share of the steps, at most 1")


@dataclass
class TrainConfig:
    """Distil reflective and attentional states into the factual one (Section 4.5)."""

    states: str
    """Folder of states (from build_states.py); the split train is read."""
    out: str
    """Run folder: config.yaml, data.json, metrics.jsonl, checkpoints/."""
    model: str = "nano"
    """Model to train: nano, or a Hugging Face folder or id of a causal or vision-language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the weights are loaded. With bfloat16, LoRA adapters are still float32; to train all weights
    in bfloat16 takes trainer.optimizer adamw8bit."""
    quantise: Literal["nf4"] | None = None
    """nf4: the linear layers of the language model in 4 bits (needs bitsandbytes, and lora). dtype is then what the
    rest is kept in, and what is computed in."""
    train_vision: bool = False
    """Train the vision tower too; otherwise it is frozen. Only states with images as pixels reach it."""
    marker_token: bool = False
    """Give the marker round salient blocks a token of its own, which is trained (under lora too) and exported;
    otherwise it is plain text."""
    seed: int = 0
    """Fixes the order of the examples and the adapters' first values."""
    resume: bool = False
    """Go on from the newest whole checkpoint in out; from the start if there is none."""
    objective: Objective = field(default_factory=Objective)
    """Eq. 6-7."""
    data: DataConfig = field(default_factory=DataConfig)
    """Examples and their limits."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teachers with other weights than the present ones."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights of the language model."""

    def __post_init__(self) -> None:
        plain = self.dtype == "bfloat16" and self.trainer.optimizer == "adamw"
        if plain and (self.lora is None or self.train_vision):
            raise ConfigError(
                "weights in bfloat16 do not move at small learning rates: set trainer.optimizer adamw8bit, or dtype "
                "float32 (with mixed_precision bf16 in accelerate), or lora alone"
            )
        if self.quantise is not None and self.lora is None:
            raise ConfigError("quantise: weights in 4 bits cannot be trained; set lora as well")
        plan(self.objective, self.trainer.step, self.trainer.prefix_sharing)


#: Settings that may differ between a run and its resumption: they do not touch the weights' trajectory.
FREE = frozenset(
    {"out", "resume", "objective.chunk", "data.cache", "data.image_root"}
    | {f"trainer.{name}" for name in ("gradient_accumulation", "gradient_checkpointing", "prefix_sharing", "trackers")}
    | {f"trainer.{name}" for name in ("eval_every", "eval_limit", "eval_split", "save_every", "keep_last")}
    | {f"trainer.guard.{name}" for name in ("mode", "ce_rise", "entropy_share")}
)


def as_dict(cfg: Any) -> dict[str, Any]:
    """A config as plain dicts, lists and scalars."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    result: dict[str, Any] = plain(asdict(cfg))
    return result


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Settings, dotted, in which two runs differ and must not if one is to go on with the other."""
    before, after = flatten(as_dict(old)), flatten(as_dict(new))
    return sorted(k for k in before.keys() | after.keys() if k not in FREE and before.get(k) != after.get(k))


def write_config(folder: Path, cfg: TrainConfig) -> None:
    write_text(folder / CONFIG, yaml.safe_dump(as_dict(cfg), sort_keys=False, allow_unicode=True))


def read_config(folder: str | Path) -> TrainConfig:
    """The config of a run folder. Raises ConfigError if there is none or it cannot be used."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: no {CONFIG}: not a run folder")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        objective = values["objective"]
        objective["edges"] = tuple(Edge(**edge) for edge in objective["edges"])
        values |= {
            "objective": Objective(**objective),
            "data": DataConfig(**values["data"]),
            "trainer": _trainer(values["trainer"]),
            "teacher": TeacherConfig(**values.get("teacher", {})),
            "lora": None if values["lora"] is None else LoraConfig(**values["lora"]),
        }
        return TrainConfig(**values)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the config of a training run: {error}") from None


def _trainer(values: dict[str, Any]) -> TrainerConfig:
    return TrainerConfig(**{**values, "guard": GuardConfig(**values.get("guard", {}))})
