"""Settings of the faithfulness measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remind.core.errors import ConfigError
from sae.ranges import PositiveInt, Seed, check_ranges


@dataclass
class FaithfulnessConfig:
    """Compare the log-probability of the target answer under x0 with what it is when turns are taken away."""

    states: str
    """Folder of states (from `remind build-states`). Their x1 says which turns are marked; the model reads x0, in which
    images stand as captions."""
    model: str
    """Causal model whose answers are examined: nano, or a Hugging Face folder or id, such as an exported checkpoint."""
    out: str
    """Folder for result.json, questions.jsonl and faithfulness.png. Must not exist unless overwrite is set."""
    sae: str | None = None
    """Folder of SAEs for the residual stream of the model; adds the ablation of guidance features. None: left out."""
    backbone: str | None = None
    """Model whose hidden states give the guidance (Eq. 3), e.g. the one the SAEs were trained on where `model` was
    trained further. None: the model itself."""
    split: Literal["train", "dev", "test"] = "test"
    """Questions to ask about."""
    limit: PositiveInt | None = None
    """At most this many questions, spread evenly over the split; for a quick look."""
    draws: PositiveInt = 5
    """Random sets of unmarked turns for each question; their mean is the control."""
    features: PositiveInt | None = 64
    """Features ablated at each layer: those with the largest guidance weight. None: all with a weight above 0."""
    on_long: Literal["error", "skip"] = "error"
    """What to do with a question that does not fit the model: stop, or leave it out and count it. Nothing is cut."""
    batch_size: PositiveInt = 4
    """Prompts in one forward. An ablation takes one at a time."""
    bootstrap: PositiveInt = 1000
    """Resamples of the questions behind each 95 % interval."""
    seed: Seed = 0
    """Of the random turns and of the resampling."""
    device: str = "cpu"
    """Where model and SAEs run, e.g. cpu or cuda:0."""
    dtype: str = "float32"
    """Precision of the model: float32, bfloat16, float16 or auto. Log-probabilities are float32 at least."""
    overwrite: bool = False
    """Replace an existing out."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.backbone is not None and self.sae is None:
            raise ConfigError("backbone gives the guidance of an ablation; set sae too, or leave backbone out")
