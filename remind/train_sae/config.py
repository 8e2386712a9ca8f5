"""Settings of SAE training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from remind.core.errors import ConfigError
from sae.config import SAETrainConfig
from sae.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, ShareBelowOne, check_ranges


@dataclass(kw_only=True)
class _Read:
    """How dialogues are read, and by what model."""

    format: str | None = None
    """Format of the data, or a mapping file (.yaml); None: recognised from the content of each file."""
    window: PositiveInt | None = None
    """Tokens per forward and row. None: 256 for encoders, 2048 for causal models, or what the model can take."""
    sink_factor: NonNegativeFloat = 10.0
    """Tokens whose norm exceeds this many times the median are left out as attention sinks; 0 keeps all."""
    device: str = "cpu"
    """Device of model and SAEs; under accelerate launch, that of each process."""
    dtype: str = "float32"
    """Precision of the model."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class TrainSAEConfig(_Read):
    """Train one Top-K SAE per layer of a backbone on dialogue text and images."""

    out: str
    """Run folder: one subfolder layer_<LL> per layer, config.yaml, metrics.jsonl, checkpoints until it is finished."""
    data: str | list[str] = field(default_factory=list)
    """Files or folders of dialogues (DialogCC, MSC, Friends, your own). Empty: the bundled synthetic small talk."""
    backbone: str = "minilm"
    """Model whose hidden states are learned: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    layers: list[NonNegativeInt | str] | None = None
    """Layers by number (0 embeddings … n output of the last block) or name (see `sae.hooks`). None: four."""
    images: str | None = None
    """Folder with the files of images that the data name by URL alone, as DialogCC does (docs/data.md)."""
    limit: PositiveInt | None = None
    """Take whole dialogues, drawn at random, until they have this many turns."""
    held_out: ShareBelowOne = 0.1
    """Share of the dialogues kept for evaluation."""
    evaluate_on: list[str] = field(default_factory=list)
    """Files or folders of dialogues to evaluate on instead of held-out ones; all of `data` is then trained on."""
    name_speakers: bool = True
    """Give numbered speakers ("Speaker 1") random names in training, since the SAE will read dialogues with names."""
    windows_per_batch: PositiveInt = 16
    """Rows per forward."""
    image_tokens: NonNegativeInt = 0
    """Show a vision-language backbone the images that are on disk, each as at most this many tokens; 0: captions
    only."""
    buffer_tokens: Annotated[int, Range(ge=1, le=2**28)] = 1 << 18
    """Size of the shuffle buffer of each process in main memory, in tokens per layer; a corpus that fits is read by
    the model only once."""
    idf_turns: PositiveInt | None = 10_000
    """Training turns over which document frequencies are counted (another pass over them); None: all."""
    loss_windows: NonNegativeInt = 32
    """Evaluation windows on which the loss recovered by splicing is measured (causal backbones); 0: not at all."""
    trainer: SAETrainConfig = field(default_factory=SAETrainConfig)
    """Size, optimiser and schedule."""
    checkpoint_every: NonNegativeInt = 500
    """Steps between checkpoints, of which the newest is kept until the run is finished; 0: none."""
    resume: bool = False
    """Continue an interrupted run with the same settings from its newest checkpoint, if there is one."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of Accelerate to report to (tensorboard, wandb, ...), in addition to metrics.jsonl."""


@dataclass
class CheckSAEConfig(_Read):
    """Measure how well SAEs fit a model, for example one they were not trained on."""

    sae: str
    """SAEs: a folder, file or repository of the hub, of this toolkit or others (docs/sae.md); what is inside is chosen
    by a path after a colon."""
    backbone: str
    """Model: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    data: list[str] = field(default_factory=list)
    """Files or folders of dialogues to measure on. Empty: the bundled synthetic small talk."""
    limit: PositiveInt | None = 2000
    """Take whole dialogues, drawn at random, until they have this many turns."""
    windows_per_batch: PositiveInt = 4
    """Rows per forward."""
    loss_windows: NonNegativeInt = 8
    """Windows on which the cross entropy recovered by splicing is measured (causal models); 0: not at all."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""


def default_layers(n_layers: int) -> list[int]:
    """Four layers at fifths of the depth, fewer where they coincide."""
    return sorted({max(1, round(n_layers * part / 5)) for part in (1, 2, 3, 4)})
