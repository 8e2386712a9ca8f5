"""Settings of the commands that show; reading them imports neither torch nor matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from remind.grounding.config import GroundingConfig
from remind.llm.endpoints import LLMConfig
from sae.ranges import NonNegativeInt, PositiveInt, Resamples, check_ranges


@dataclass
class InspectConfig:
    """Write pages that show the grounding of questions: tokens by resonance, features, blocks, evidence, states."""

    states: str
    """Folder of states (from `remind build-states`)."""
    question: str | None = None
    """Id of the question to show."""
    all: bool = False
    """Show every question of the states, with an index page. Pages that a stopped run finished are kept."""
    out: str = "runs/inspector"
    """Folder for the pages and index.html. With one question also a file name ending in .html."""
    split: Literal["train", "dev", "test"] | None = None
    """With all: only questions of this split."""
    limit: PositiveInt | None = None
    """With all: at most this many questions, the first ones."""
    corpus: str | list[str] | None = None
    """The dialogues of the states, whose codes are computed again. None: those the states were built from."""
    format: str | None = None
    """Format of the corpus, or a mapping file (.yaml); None: detected from the content."""
    backbone: str | None = None
    """Model whose hidden states the SAEs read; None: the one the states were built with, if it is built in or a folder.
    One from the hub must be named here."""
    sae: str | None = None
    """Folder of SAEs; None: the one the states were built with."""
    grounding: GroundingConfig | None = None
    """Settings of grounding; None: those the states were built with."""
    explanations: str | None = None
    """Folder with names of features (from `remind feature-pages`); None: none are shown."""
    model: str | None = None
    """Causal model whose answers from x0, x1 and x2 are shown; None: no answers. Images are shown to it as in its
    training, according to training.json in its folder."""
    max_new_tokens: PositiveInt = 160
    """Longest answer."""
    features: PositiveInt | None = 12
    """Features shown of each token and layer: those that add most to its resonance, then the strongest. None: all."""
    per_feature: PositiveInt = 4
    """Examples shown of each feature."""
    device: str = "cpu"
    """Device of models and SAEs."""
    dtype: str = "float32"
    """Precision of the models."""
    overwrite: bool = False
    """Replace pages that are there already."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.all == (self.question is not None):
            raise ConfigError("name a question (--question ID), or set --all true")
        if self.all and self.out.endswith(".html"):
            raise ConfigError("with all, out must be a folder")


@dataclass
class FeaturePagesConfig:
    """Write pages of an SAE's features: where each fires, how often and how strongly, and its neighbours."""

    sae: str
    """Folder of SAEs (from `remind train-sae`)."""
    data: list[str] = field(default_factory=list)
    """Files or folders of dialogues to look for examples in. Empty: the bundled sample, for the nano backbone a small
    synthetic world with drawn images."""
    backbone: str = "minilm"
    """Model the SAEs were trained on: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    layers: list[NonNegativeInt] | None = None
    """Layers to write pages of; None: all of the folder."""
    out: str = "runs/features"
    """Folder for the pages, layer_<number>.html each."""
    most: PositiveInt = 500
    """Features on a page, those with the largest activations."""
    per_feature: PositiveInt = 10
    """Examples shown of each feature."""
    limit: PositiveInt | None = None
    """Read at most this many sessions, the first ones; long ones are cut into windows."""
    image_tokens: NonNegativeInt = 0
    """Show a vision-language backbone the images that are on disk, each as at most this many tokens (as in
    `train-sae`), and show on which patches features fire; 0: captions only."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoint of the chat model that names features and scores the names (llm.explain, else llm.default); without one
    the words are shown on which examples peak."""
    named: PositiveInt = 100
    """Features the chat model names on each page, the first ones; one request each, and up to four for its scores."""
    device: str = "cpu"
    """Device of model and SAEs."""
    dtype: str = "float32"
    """Precision of the model."""
    overwrite: bool = False
    """Replace pages that are there already."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class CompareModelsConfig:
    """Show what training changed: features, how far x2 has moved into x0, what answers read, whether SAEs still fit."""

    before: str
    """Causal model before training: nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    after: str
    """The same model after it: what `remind export` wrote."""
    states: str
    """Folder of states whose questions are read; those without a gold answer are left out."""
    sae: str
    """SAEs of the model before: a folder as `sae.load_layers` reads."""
    out: str
    """Folder for diff.json, diff.md and diff.png."""
    split: str | None = "test"
    """Read questions of this split; None: of all."""
    limit: PositiveInt | None = 50
    """Read at most this many questions with a gold answer, the first ones."""
    per_dialogue: PositiveInt | None = None
    """Read at most this many of them of each dialogue."""
    attention: bool = True
    """Measure the attention to turns when answers are predicted, which needs another forward pass."""
    features: PositiveInt = 20
    """Features listed of each layer and kind of position."""
    resamples: Resamples = 2000
    """Resamples of whole dialogues for the intervals."""
    device: str = "cpu"
    """Device of models and SAEs."""
    dtype: str = "float32"
    """Precision of the models."""
    overwrite: bool = False
    """Replace files that are there already."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class PlotRunConfig:
    """Plot training runs: loss shares, divergences, cross-entropies, entropies, accuracy."""

    run: list[str]
    """Run folders of `remind train-pra`; each is one row of the plot."""
    out: str | None = None
    """File to write: .png, .svg or .pdf. None: trajectory.png in the first run folder."""
    panels: tuple[str, ...] = ()
    """Which of shares, jsd, ce, entropy, accuracy, lr to plot. None given: all that a run has measured, except lr."""
    smooth: PositiveInt = 1
    """Steps over which lines of training batches are averaged, each with those before it; 1: no smoothing."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.panels = tuple(self.panels)
        if not self.run:
            raise ConfigError("name a run folder: --run '[runs/pra]'")
        if self.out is not None and not self.out.endswith((".png", ".svg", ".pdf")):
            raise ConfigError(f"out {self.out}: a plot is written as .png, .svg or .pdf")
