"""Settings of the inspector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remind.core.errors import ConfigError
from remind.grounding import GroundingConfig


@dataclass
class InspectConfig:
    """Write pages that show the grounding of questions: tokens by resonance, features, blocks, evidence, states."""

    states: str
    """Folder of states (from build_states.py)."""
    question: str | None = None
    """Id of the question to show."""
    all: bool = False
    """Show every question of the states, with an index page, in place of one."""
    out: str = "runs/inspector"
    """Folder for the pages and index.html. With one question also a file name ending in .html."""
    split: Literal["train", "dev", "test"] | None = None
    """With all: only questions of this split."""
    limit: int | None = None
    """With all: at most this many questions, the first ones."""
    corpus: str | list[str] | None = None
    """The dialogues of the states, for their codes are computed anew. None: where the states were built from."""
    format: str | None = None
    """Format of the corpus; None: recognised from the content."""
    backbone: str | None = None
    """Model whose hidden states the SAEs read; None: the one the states were built with, if it is built in or a folder.
    One from the hub must be named here."""
    sae: str | None = None
    """Folder of SAEs; None: the one the states were built with."""
    grounding: GroundingConfig | None = None
    """Settings of grounding; None: those the states were built with."""
    examples: str | list[str] | None = None
    """Dialogues to look for each feature's top examples in. None: the retrieved dialogue at hand."""
    examples_limit: int = 4000
    """Turns of them to read, the first ones."""
    model: str | None = None
    """Causal model whose answers under x0, x1 and x2 are shown; None: no answers."""
    max_new_tokens: int = 160
    """Longest answer."""
    features: int | None = 12
    """Features shown of each token and layer, half of them those that add most to its resonance. None: all."""
    per_feature: int = 4
    """Examples shown of each feature."""
    device: str = "cpu"
    """Device of models and SAEs."""
    dtype: str = "float32"
    """Precision of the models."""
    overwrite: bool = False
    """Replace pages that are there already."""

    def __post_init__(self) -> None:
        if self.all == (self.question is not None):
            raise ConfigError("name a question (--question ID), or ask for every one (--all true)")
        if self.all and self.out.endswith(".html"):
            raise ConfigError("with all, out is a folder")
        for name in ("limit", "features", "per_feature", "max_new_tokens", "examples_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
