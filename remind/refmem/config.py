"""Settings of a benchmark build, stage by stage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS, Format
from remind.llm.endpoints import LLMConfig
from remind.llm.request import Stage
from remind.perception.config import SegmentConfig
from sae.ranges import NonNegativeInt, PositiveInt, PositiveShare, Range, Seed, Share, check_ranges

#: Of a merge: conflicts that a person decides in a copy.
CONFLICTS = "conflicts.jsonl"
StageName = Literal["clusters", "items", "filtered", "benchmark"]
#: Endpoints that each style needs; of RefMem-Bench's own the first from items on, the second from filtered on.
STAGES_OF: Mapping[str, tuple[Stage, ...]] = {
    "reflective": ("questions", "answer"),
    "p13n": ("questions",),
    "session": ("questions", "answer", "judge", "memory"),
}
#: The stages in order; each writes a folder of that name.
STAGES: tuple[StageName, ...] = get_args(StageName)


@dataclass
class ClusterConfig:
    """Clusters of one dialogue's segments, or of one speaker's images."""

    distance: Annotated[float, Range(gt=0, le=2)] = 0.55
    """Cosine distance up to which clusters are merged; the number of clusters follows from it. With linkage ward:
    how much a merge may add to the sum of squares within clusters of unit vectors, for two vectors the same."""
    linkage: Literal["average", "complete", "single", "ward"] = "average"
    """Linkage of the agglomerative clustering."""
    max_size: PositiveInt = 12
    """A cluster with more members is divided by K-Means into as few parts as this needs."""
    min_size: PositiveInt = 2
    """A cluster with fewer members gets no questions."""
    seed: Seed = 0
    """Seed of K-Means."""


@dataclass
class ItemsConfig:
    """Questions of a cluster."""

    per_cluster: PositiveInt = 2
    """Items of each dimension and format per cluster, at most."""
    formats: list[Format] = field(default_factory=lambda: list(FORMATS))
    """Formats to ask for: single, multi, direct."""
    images: Literal["captions", "pixels"] = "captions"
    """How the chat model is shown the images of a cluster: by their captions, or also as pixels where their files are
    known, which takes a model that sees images."""
    max_turns: PositiveInt = 60
    """Turns of a cluster that the chat model is shown at most, spread over it evenly."""
    seed: Seed = 0
    """Seed of the order in which options are listed."""


@dataclass
class P13nConfig:
    """Questions that are answered better by who knows the person (style p13n)."""

    groups: PositiveInt = 20
    """Topics of each speaker, at most; each has a question of both kinds."""
    episode_turns: PositiveInt | None = None
    """Write for each question a dialogue of its own: the turns of its evidence and the nearest to them, at most so many
    (16 in the paper's training). None: whole dialogues."""


@dataclass
class SessionConfig:
    """Questions on each session (style session)."""

    count: PositiveInt = 5
    """J: questions of each session."""
    rewrites: NonNegativeInt = 2
    """How often questions that fail the check are written anew before they are dropped."""


@dataclass
class FilterConfig:
    """What is removed before annotation."""

    near_duplicate: PositiveShare = 0.85
    """Jaccard similarity from which two items of a dialogue and format are the same one: over the stems of their
    questions, and over those of their correct answers."""
    length_ratio: Annotated[float, Range(ge=1)] = 2.0
    """The longest option may have this many times the characters of the shortest."""
    length_slack: NonNegativeInt = 12
    """Characters of difference that never count as uneven."""
    blind_draws: NonNegativeInt = 3
    """Attempts of llm.answer without the dialogue; an item answered correctly in all of them is removed. 0: none."""
    seed: Seed = 0
    """Seed of the order of the options in each attempt."""


@dataclass
class RefMemConfig:
    """Build a reflective-memory benchmark from long dialogues."""

    input: str | list[str]
    """File or folder of dialogues, in any format the toolkit reads; a list of several is merged. Questions in the
    files are ignored."""
    out: str
    """Folder of the build. Stages finished there are not run again while input and settings are the same."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml) for JSON of another shape; None: recognised from the content."""
    images: str | None = None
    """Folder with the files of images that the input names by URL alone, as LoCoMo and DialogCC do (docs/data.md)."""
    limit: PositiveInt | None = None
    """At most this many dialogues, the first ones; for a quick look."""
    style: Literal["reflective", "p13n", "session"] = "reflective"
    """reflective: RefMem-Bench's questions, in all stages. p13n: recommendations and other requests that are answered
    better by who knows the person (SaliMory, Appendix B.1). session: questions on each session with what a memory held
    before it (MemBuilder, Appendix B.2). The last two read `p13n` or `session_questions`, and no other setting of
    stages."""
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
    p13n: P13nConfig = field(default_factory=P13nConfig)
    """Of style p13n."""
    session_questions: SessionConfig = field(default_factory=SessionConfig)
    """Of style session."""
    train: Share = 0.2
    """Share of the items for training; the rest is the test split (Section 3 divides 2:8)."""
    seed: Seed = 0
    """Order in which evidence clusters are dealt to the two splits."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Chat models: llm.questions writes the items, llm.answer tries them without the dialogue; or llm.default both. Of
    style session llm.memory writes the memory, and llm.judge the verdicts on answers."""
    device: str = "cpu"
    """Device of the encoders."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.llm.dry_run is not None:
            raise ConfigError("a build has no dry run: each stage needs the result of the one before it")

    def check_endpoints(self) -> None:
        """Raise ConfigError where a stage up to `until` needs a chat model and none is named."""
        needed = STAGES_OF[self.style]
        if self.style == "reflective":
            guessed = self.filters.blind_draws and self.until not in ("clusters", "items")
            needed = needed[: 0 if self.until == "clusters" else 2 if guessed else 1]
        for stage in needed:
            if self.llm.endpoint(stage) is None:
                without = ", or filters.blind_draws 0" if self.style == "reflective" and stage == "answer" else ""
                where = "model, and base_url of an OpenAI-compatible server or `local`"
                raise ConfigError(f"style {self.style} needs llm.{stage} or llm.default ({where}){without}")


@dataclass
class AnnotateConfig:
    """Write the pages on which annotators check draft items."""

    drafts: str
    """Draft items (items.jsonl of a build's filtered stage)."""
    input: str | list[str]
    """The dialogues of that build; a list of several is merged."""
    out: str
    """Folder for the pages (annotate_NAME.html)."""
    annotators: list[str] = field(default_factory=lambda: ["A", "B", "C"])
    """Their names; a name and the seed set the order of items and candidate answers."""
    format: str | None = None
    """Format of the dialogues, or a mapping file (.yaml); None: recognised from the content."""
    seed: Seed = 0
    """Seed of the orders."""
    around: NonNegativeInt = 4
    """Turns shown before and after each proposed evidence turn; a key shows the rest of the dialogue."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        names = [file_name(name) for name in self.annotators]
        if not names or not all(name.strip() for name in self.annotators) or len(set(names)) < len(names):
            raise ConfigError("annotators: give at least one name, all different as file names")


def file_name(annotator: str) -> str:
    """The file name of an annotator's page."""
    return "annotate_" + re.sub(r"[^\w.-]+", "_", annotator.strip()) + ".html"


@dataclass
class MergeConfig:
    """Merge annotations: agreement before discussion, conflicts, removal rates, the adjudicated items."""

    drafts: str
    """The items.jsonl the pages were made from."""
    annotations: str | list[str]
    """Each annotator's JSON Lines file; a folder stands for all its .jsonl files."""
    out: str
    """Folder for agreement.json, report.md, conflicts.jsonl, decisions.jsonl and final.jsonl."""
    resolutions: str | None = None
    """JSON Lines that decide conflicts: item_id and what was agreed on of answers, evidence, images and remove."""

    def __post_init__(self) -> None:
        if self.resolutions and Path(self.resolutions).resolve() == (Path(self.out) / CONFLICTS).resolve():
            raise ConfigError(f"resolutions: {self.resolutions} is overwritten by the merge; give an edited copy")
