"""Settings of the commands `check-states`, `train-pra` and `export`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from remind.alignment.config import ExampleConfig, LoopConfig, LoraConfig, Objective
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.core.run_folder import CONFIG
from sae.ranges import PositiveInt, Seed, check_ranges

#: What a run was trained on; and, in an export, how it was trained.
DATA, TRAINING = "data.json", "training.json"


@dataclass
class DataConfig(ExampleConfig):
    """Which states become training examples."""

    limit: PositiveInt | None = None
    """At most this many training questions, the first ones; for a quick look."""
    eval_split: str = "dev"
    """Split for the held-out loss, used to detect collapses and to choose the best checkpoint. Without such questions
    in the states, it is not measured. With test, no checkpoint is chosen, so that the test split stays unused."""
    eval_limit: PositiveInt | None = 64
    """At most this many held-out questions, the first ones; None: all."""


@dataclass
class TrainerConfig(LoopConfig):
    """The loop: steps, learning rate, evaluation and checkpoints, as in transformers' TrainingArguments."""

    more: dict[str, Any] = field(default_factory=dict)
    """Any other field of TrainingArguments, e.g. `torch_compile: true`."""


@dataclass
class TrainConfig:
    """Distil reflective and attentional states into the factual one (Section 4.5)."""

    states: str
    """Folder of states (from `remind build-states`); the split train is read."""
    out: str
    """Run folder: config.yaml, metrics.jsonl, checkpoints."""
    model: str = "nano"
    """Model to train: nano, smollm2, or a Hugging Face folder or id of a causal or vision-language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the weights are loaded. With bfloat16, LoRA adapters are still float32; to train all weights
    in bfloat16 takes trainer.optim adamw_torch_8bit."""
    quantise: Literal["nf4"] | None = None
    """nf4: the linear layers of the language model in 4 bits (needs bitsandbytes, and lora). dtype is then what the
    rest is kept in, and what is computed in."""
    seed: Seed = 0
    """Fixes the order of the examples and the adapters' first values."""
    resume: bool = False
    """Go on from the newest whole checkpoint in out; from the start if there is none."""
    objective: Objective = field(default_factory=Objective)
    """Eq. 6-7."""
    data: DataConfig = field(default_factory=DataConfig)
    """Examples and their limits."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights of the language model."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.quantise is not None and self.lora is None:
            raise ConfigError("quantise: weights in 4 bits cannot be trained; set lora as well")

    def arguments(self) -> dict[str, Any]:
        """The fields of a `PRAConfig` that these settings give."""
        own = {**vars(self.objective), **vars(self.data), **vars(self.trainer)}
        for name in ("limit", "eval_split", "eval_limit", "more"):
            del own[name]
        return {"output_dir": self.out, "seed": self.seed, "dtype": self.dtype, **own, **self.trainer.more}


@dataclass
class CheckStatesConfig:
    """Measure whether the higher states make gold answers more probable, so that PRA has something to teach."""

    states: str
    """Folder of states."""
    model: str = "nano"
    """Model that reads them: nano, smollm2, or a Hugging Face folder or id."""
    split: str = "dev"
    """Split whose questions are read."""
    questions: PositiveInt = 64
    """At most this many questions with a gold answer, spread evenly over the split."""
    device: str = "cpu"
    """Device of the model."""
    dtype: str = "float32"
    """Precision of the model."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class ExportConfig:
    """Write a trained checkpoint as a plain Hugging Face folder."""

    run: str
    """Run folder of `remind train-pra`."""
    out: str
    """Folder to write. Must not exist unless overwrite is set."""
    checkpoint: Literal["last", "best"] = "last"
    """last: the newest whole one. best: the one with the lowest held-out loss under x0 on the dev split."""
    base: str | None = None
    """The base model, if it is no longer where the run found it. It must be the same one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights; None: that of training."""
    quantise: Literal["nf4"] | None = None
    """nf4: write the linear layers of the language model in 4 bits (needs bitsandbytes, to open it as well)."""
    adapter_only: bool = False
    """Write the adapters alone, as a PEFT folder that goes on the base model."""
    overwrite: bool = False
    """Replace an existing folder."""


def read_config(folder: str | Path) -> TrainConfig:
    """The config of a run folder. Raises ConfigError if there is none or it cannot be used."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: no {CONFIG}: not a run folder")
    parts = {"objective": Objective, "data": DataConfig, "trainer": TrainerConfig, "lora": LoraConfig}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        made = {name: kind(**values[name]) for name, kind in parts.items() if values[name] is not None}
        return TrainConfig(**{**values, **made})
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the config of a training run of this version: {error}") from None


def images_in_training(model: str | Path | None) -> tuple[Literal["captions", "pixels"], int]:
    """How a model was shown images in training: `data.images`, `data.image_tokens`.

    By the training.json of an export or the config of a run. Captions where there is no folder or none of these files,
    or where it says nothing of images. Raises DataError, ConfigError for a damaged file.
    """
    default = DataConfig()
    if model is not None and all((Path(model) / name).is_file() for name in (CONFIG, DATA)):
        run = read_config(model).data
        return run.images, run.image_tokens
    path = None if model is None else Path(model) / TRAINING
    about = read_json(path) if path is not None and path.is_file() else None
    for key in ("config", "data"):
        about = about.get(key) if isinstance(about, dict) else None
    if not isinstance(about, dict) or about.get("images") != "pixels":
        return default.images, default.image_tokens
    tokens = about.get("image_tokens")
    if type(tokens) is not int or tokens < 1:
        raise DataError("config.data.image_tokens is not a number of tokens", path)
    return "pixels", tokens
