"""Settings of a benchmark build, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS
from remind.llm.endpoints import LLMConfig
from remind.perception.config import SegmentConfig

StageName = Literal["clusters", "items", "filtered", "benchmark"]
#: The stages in order; each writes a folder of that name.
STAGES: tuple[StageName, ...] = get_args(StageName)


@dataclass
class ClusterConfig:
    """Clusters of one dialogue's segments, or of one speaker's images."""

    distance: float = 0.55
    """Cosine distance up to which clusters are merged; the number of clusters follows from it."""
    linkage: Literal["average", "complete", "single"] = "average"
    """Linkage of the agglomerative clustering."""
    max_size: int = 12
    """A cluster with more members is divided by K-Means into as few parts as this needs."""
    min_size: int = 2
    """A cluster with fewer members gets no questions."""
    seed: int = 0
    """Seed of K-Means."""

    def __post_init__(self) -> None:
        if not 0 < self.distance <= 2:
            raise ConfigError(f"cluster: a cosine distance lies between 0 and 2, not {self.distance}")
        if not 1 <= self.min_size <= self.max_size:
            raise ConfigError("cluster: min_size must be at least 1 and at most max_size")


@dataclass
class ItemsConfig:
    """Questions of a cluster."""

    per_cluster: int = 2
    """Items of each dimension and format per cluster, at most."""
    formats: list[str] = field(default_factory=lambda: list(FORMATS))
    """Formats to ask for: single, multi, direct."""
    max_turns: int = 60
    """Turns of a cluster that the chat model is shown at most, spread over it evenly."""
    seed: int = 0
    """Seed of the order in which options are listed."""

    def __post_init__(self) -> None:
        if self.per_cluster < 1 or self.max_turns < 1:
            raise ConfigError("questions: per_cluster and max_turns must be at least 1")
        if not self.formats or set(self.formats) - set(FORMATS):
            raise ConfigError(f"questions: formats are {', '.join(FORMATS)}, not {self.formats}")


@dataclass
class FilterConfig:
    """What is removed before annotation."""

    near_duplicate: float = 0.85
    """Jaccard similarity from which two items of a dialogue and format are the same one: over the stems of their
    questions, and over those of their correct answers."""
    length_ratio: float = 2.0
    """The longest option may have this many times the characters of the shortest."""
    length_slack: int = 12
    """Characters of difference that never count as uneven."""
    blind_draws: int = 3
    """Attempts of llm.answer without the dialogue; an item answered correctly in all of them is removed. 0: none."""
    seed: int = 0
    """Seed of the order of the options in each attempt."""

    def __post_init__(self) -> None:
        if not 0 < self.near_duplicate <= 1:
            raise ConfigError(f"filters: near_duplicate is a share above 0 and up to 1, not {self.near_duplicate}")
        if self.length_ratio < 1 or self.length_slack < 0 or self.blind_draws < 0:
            raise ConfigError("filters: length_ratio is at least 1; length_slack and blind_draws at least 0")


@dataclass
class RefMemConfig:
    """Build a reflective-memory benchmark from long dialogues."""

    input: str | list[str]
    """File or folder of dialogues, in any format the toolkit reads; a list of several is merged. Questions in the
    files are ignored."""
    out: str
    """Folder of the build. Stages finished there are not run again while input and settings are the same."""
    format: str | None = None
    """Format of the input; None: recognised from the content."""
    limit: int | None = None
    """At most this many dialogues, the first ones; for a quick look."""
    until: StageName = "benchmark"
    """Last stage to run: clusters, items, filtered or benchmark."""
    adjudicated: str | None = None
    """Items after annotation (final.jsonl of `remind merge-annotations`). None: the filtered items as they are."""
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    """Topical segments."""
    cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(min_size=3))
    """Clusters of segments (text branch)."""
    image_cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(distance=0.6, max_size=16))
    """Clusters of images (image branch)."""
    clip: str | None = None
    """CLIP checkpoint for images with pixels: a folder or Hugging Face id. None: captions are encoded by MiniLM."""
    questions: ItemsConfig = field(default_factory=ItemsConfig)
    """Questions."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Filters."""
    train: float = 0.2
    """Share of the items for training; the rest is the test split (the paper divides 2:8)."""
    seed: int = 0
    """Order in which evidence clusters are dealt to the two splits."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Chat models: llm.questions writes the items, llm.answer tries them without the dialogue; or llm.default both."""
    device: str = "cpu"
    """Device of the encoders."""

    def __post_init__(self) -> None:
        if not 0 <= self.train <= 1:
            raise ConfigError(f"train is a share from 0 to 1, not {self.train}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is at least 1, not {self.limit}")
        if self.llm.dry_run is not None:
            raise ConfigError("a build has no dry run: each stage needs the result of the one before it")

    def check_endpoints(self) -> None:
        """Raise ConfigError where a stage up to `until` needs a chat model and none is named."""
        last = STAGES.index(self.until)
        where = "model, and base_url of an OpenAI-compatible server or `local`"
        if last >= STAGES.index("items") and self.llm.endpoint("questions") is None:
            raise ConfigError(f"a chat model writes the items: set llm.questions or llm.default ({where})")
        if last >= STAGES.index("filtered") and self.filters.blind_draws and self.llm.endpoint("answer") is None:
            raise ConfigError(
                f"a chat model tries the items blind: set llm.answer or llm.default ({where}), or filters.blind_draws 0"
            )
