"""`PRAConfig`: transformers' TrainingArguments with the settings of Progressive Reflective Alignment."""

from __future__ import annotations

import os
import shutil
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from remind.alignment.config import ExampleConfig, LoopConfig, Objective
from remind.core import optional
from remind.core.errors import ConfigError
from sae.ranges import check_ranges


@dataclass
class PRAConfig(LoopConfig, ExampleConfig, Objective, TrainingArguments):
    """Arguments of `PRATrainer`: all of TrainingArguments, the objective (Eq. 6-7) and what becomes an example.

    `batch_size` is global: the samples of one optimiser step over all processes and accumulated microbatches. It has
    to divide by processes x gradient_accumulation_steps. `PRAConfig("runs/pra", edges=[(0, 1), (0, 2)])` is enough.

    Raises:
        ConfigError: settings that cannot work, with what to change.
    """

    per_device_train_batch_size: int | None = None
    """Follows from batch_size."""
    per_device_eval_batch_size: int | None = None
    """Held-out questions a process reads at once; None: its share of batch_size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which a model that is given by name is loaded."""
    metric_for_best_model: str | None = "ce0"
    """Held-out figure of the best checkpoint; None: none is chosen."""
    greater_is_better: bool | None = False
    logging_nan_inf_filter: bool = False
    ddp_find_unused_parameters: bool | None = False
    remove_unused_columns: bool = False
    use_cache: bool = True

    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        for part in (ExampleConfig, LoopConfig):
            check_ranges(self, ConfigError, part)
        if self.targets == "decoded" and self.unlabelled == "skip":
            raise ConfigError("targets decoded: unlabelled must name the state to answer from, x2 or x1")
        if not self.trained:
            raise ConfigError("nothing is trained: no hard level counts and no edge has gamma above 0")
        if self.targets != "gold" and not self.active:
            raise ConfigError(f"targets {self.targets}: nothing is distilled: no edge has gamma above 0")
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
            # a step runs the model several times before it goes backward, at which ZeRO-3 fails (their issue 5321)
            raise ConfigError("training under DeepSpeed is not supported; use DDP, or FSDP with fsdp_version 2")
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        pieces = processes * self.gradient_accumulation_steps
        share, rest = divmod(self.batch_size, pieces)
        if rest or self.per_device_train_batch_size not in (None, share):
            raise ConfigError(
                f"batch_size {self.batch_size} is global and gives per_device_train_batch_size; with {processes} "
                f"processes x {self.gradient_accumulation_steps} microbatches use a multiple of {pieces}"
            )
        self.per_device_train_batch_size = share
        self.per_device_eval_batch_size = self.per_device_eval_batch_size or self.batch_size // processes
        given: Any = self
        device = torch.accelerator.current_accelerator(check_available=True)
        # without it, processes without a GPU would each train alone; Apple's GPUs have no float64, in which metrics
        # are summed
        given.use_cpu = given.use_cpu or device is None or device.type == "mps"
        if self.sharded:
            # holding back FSDP's reduction would keep whole gradients in memory
            given.accelerator_config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        TrainingArguments.__post_init__(self)
        # to know which are there imports them
        if given.report_to and (missing := sorted({*given.report_to} - {*get_available_reporting_integrations()})):
            raise ConfigError(f"report_to: no tracker {missing[0]}; pip install {missing[0]}, or leave it out")
        given._n_gpu = min(given._n_gpu, 1)  # one process trains on one GPU
        if self.world_size != processes:
            raise ConfigError("launched as processes that did not connect; see configs/accelerate/cpu_2.yaml")
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigError(f"mixed_precision {self.mixed_precision} is not supported; use no or bf16")

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded among the processes (FSDP2)."""
        return bool(self.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"

    @property
    def objective(self) -> Objective:
        """The fields that say what is minimised."""
        return Objective(**{field.name: getattr(self, field.name) for field in fields(Objective)})

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: edges are (student, teacher, gamma, alpha)."""
        # what ends in "_token" is taken for a secret
        ours = {"edges": [list(astuple(edge)) for edge in self.edges], "marker_token": self.marker_token}
        return {**super().to_dict(), **ours}


def rounding_optimizer(args: PRAConfig, model: nn.Module) -> tuple[Any, dict[str, Any]] | None:
    """For optim adamw_torch_8bit: torchao's AdamW, told to round bfloat16 weights stochastically.

    Raises:
        ConfigError: another optimiser, whose steps would be rounded away; or no C++ compiler. ModelError: no torchao.
    """
    if args.optim != "adamw_torch_8bit":
        narrow = any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        if narrow and not (args.sharded and args.mixed_precision == "bf16"):
            raise ConfigError(
                "weights in bfloat16 do not move at small learning rates: set optim adamw_torch_8bit, or dtype float32 "
                "(with bf16 true), or a peft_config"
            )
        return None
    if shutil.which("g++") is None:
        raise ConfigError("optim adamw_torch_8bit is compiled when it starts: install a C++ compiler (g++)")
    kind = optional("torchao.optim", "optim adamw_torch_8bit").AdamW8bit
    betas = (args.adam_beta1, args.adam_beta2)
    return kind, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "bf16_stochastic_round": True}
