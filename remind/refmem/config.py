"""Settings of a benchmark build, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS
from remind.llm.endpoints import LLMConfig
from remind.perception.segment import SegmentConfig

#: The stages in order; each leaves a folder.
StageName = Literal["segments", "images", "clusters", "items", "filtered", "benchmark"]


@dataclass
class ClusterConfig:
    """Groups of one dialogue's segments, or of one speaker's images."""

    distance: float = 0.55
    """Cosine distance up to which groups are merged; the number of groups follows from it."""
    linkage: Literal["average", "complete", "single"] = "average"
    """How the distance of two groups is told from those of their members."""
    max_size: int = 12
    """A group of more members is divided by K-Means into as few parts as this needs."""
    min_size: int = 2
    """A group of fewer members makes no questions."""
    seed: int = 0
    """Where K-Means starts."""

    def __post_init__(self) -> None:
        if not 0 < self.distance <= 2:
            raise ConfigError(f"cluster: a cosine distance lies between 0 and 2, not {self.distance}")
        if not 1 <= self.min_size <= self.max_size:
            raise ConfigError("cluster: min_size must be at least 1 and at most max_size")


@dataclass
class ItemsConfig:
    """Questions of a cluster."""

    per_cluster: int = 2
    """Items of each dimension and format that a cluster gives at most."""
    formats: list[str] = field(default_factory=lambda: list(FORMATS))
    """Formats to make: single, multi, direct."""
    max_turns: int = 60
    """Turns of a cluster that a chat model is shown at most, spread over it evenly."""
    seed: int = 0
    """Which distractors are drawn, and where the answers stand."""

    def __post_init__(self) -> None:
        if self.per_cluster < 1 or self.max_turns < 1:
            raise ConfigError("questions: per_cluster and max_turns must be at least 1")
        if not self.formats or set(self.formats) - set(FORMATS):
            raise ConfigError(f"questions: formats are {', '.join(FORMATS)}, not {self.formats}")


@dataclass
class FilterConfig:
    """What is thrown out before anybody annotates."""

    near_duplicate: float = 0.85
    """Jaccard similarity from which two items of a dialogue and format are the same one: over the stems of their
    questions, and over those of their correct answers."""
    length_ratio: float = 2.0
    """The longest option may have this many times the characters of the shortest."""
    length_slack: int = 12
    """Characters of difference that never count as uneven."""
    blind_draws: int = 3
    """Tries to answer without the dialogue; an item answered in all of them goes. 0: nobody tries."""
    seed: int = 0
    """Order of the options in each try."""

    def __post_init__(self) -> None:
        if not 0 < self.near_duplicate <= 1:
            raise ConfigError(f"filters: near_duplicate is a share above 0 and up to 1, not {self.near_duplicate}")
        if self.length_ratio < 1 or self.length_slack < 0 or self.blind_draws < 0:
            raise ConfigError("filters: length_ratio is at least 1; length_slack and blind_draws at least 0")


@dataclass
class RefMemConfig:
    """Build a reflective-memory benchmark from long dialogues."""

    input: str | list[str]
    """File or folder of dialogues, in any format the toolkit reads; a list of several is merged. Questions that the
    files hold are left aside."""
    out: str
    """Folder of the build. Stages found finished there are not done again while input and settings are the same."""
    format: str | None = None
    """Format of the input; None: recognised from the content."""
    limit: int | None = None
    """At most this many dialogues, the first ones; for a quick look."""
    until: StageName = "benchmark"
    """Last stage to do: segments, images, clusters, items, filtered or benchmark."""
    adjudicated: str | None = None
    """Items after annotation (JSONL, a file the merge of annotations writes). None: the filtered items as they are."""
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    """Topical segments."""
    cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(min_size=3))
    """Groups of segments (text branch)."""
    image_cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(distance=0.6, max_size=16))
    """Groups of images (image branch)."""
    clip: str | None = None
    """CLIP checkpoint for images with pixels: a folder or Hugging Face id. None: captions are encoded by MiniLM."""
    questions: ItemsConfig = field(default_factory=ItemsConfig)
    """Questions."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Filters."""
    train: float = 0.2
    """Share of the items for training; the rest is the test split (the paper divides 2:8)."""
    seed: int = 0
    """Order in which evidence clusters are dealt to the two sides."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Who writes items (llm.questions) and tries them without the dialogue (llm.answer); rules where nobody does."""
    device: str = "cpu"
    """Device of the encoders."""

    def __post_init__(self) -> None:
        if not 0 <= self.train <= 1:
            raise ConfigError(f"train is a share from 0 to 1, not {self.train}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is at least 1, not {self.limit}")
        if self.llm.dry_run is not None:
            raise ConfigError("a build has no dry run: each stage needs what the one before it made")
