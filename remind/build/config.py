"""Settings of `remind build-states`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError, shown
from remind.data.dialogue import SPLITS
from remind.data.split import SplitConfig
from remind.grounding import GroundingConfig
from remind.llm.endpoints import LLMConfig
from remind.perception import PerceptionConfig
from remind.states.pyramid import LEVELS
from sae.ranges import PositiveInt, Share, Workers, check_ranges


@dataclass
class BuildStatesConfig:
    """Build x0, x1 and x2 for every question of a corpus."""

    input: str | list[str]
    """File or folder of dialogues with questions; a list of several is merged."""
    out: str | None
    """Folder for the states: a dataset that datasets.load_dataset opens. One that was begun with the same input and
    settings is gone on with; any other is an error unless overwrite is set. None: a folder in the cache."""
    levels: str | tuple[str, ...] | dict[str, str | tuple[str, ...]] = LEVELS
    """States to build, from x0 up: of all questions, or by split, {train: [x0, x1, x2], test: x0}; a split that is not
    named gets all three. x0 alone costs no SAE forward and no summary, and is all that answering needs; x0 and x1 cost
    no summary."""
    ask: list[str] | None = None
    """Questions of your own about each dialogue, in place of those of the input: --ask "Who …?" --ask "When …?". They
    have no gold answer, and their split is test."""
    abstention: bool | None = None
    """Whether prompts of direct questions say what to answer if the conversation does not contain the answer. None: if
    any question of the input has that answer (LoCoMo, LongMemEval), and with ask. It is the same for all questions.
    Choose what the model was trained with; nano was trained with such prompts."""
    backbone: str = "minilm"
    """Model whose hidden states the SAEs read: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    sae: str | None = None
    """Folder of trained SAEs (from `remind train-sae`). None: a small SAE is trained on synthetic small talk first, and
    cached."""
    summary: Literal["llm", "evidence"] = "llm"
    """What x2 adds. llm: a summary of x1 by llm. evidence: the gold evidence that x0 holds, quoted, and x1 without
    marks, which needs no SAE: for PRA where no model writes better summaries than the one trained. Answers from such an
    x2 are an upper limit."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml) for other JSON formats; None: recognised from the content."""
    images: str | None = None
    """Folder with the files of images that the input names by URL alone, as LoCoMo and DialogCC do (docs/data.md)."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Chat models that write cues, strategies and summaries; without an endpoint, offline rules are used."""
    max_failed: Share = 0.1
    """Share of a stage's requests that may fail and be replaced by offline rules; if more fail, nothing is built."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Train, dev and test."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    dialogues: PositiveInt | None = None
    """Build this many dialogues alone, by turns the first of those that the input gives to training, test and dev; the
    others are left out of the splits, too. For a quick look."""
    workers: Workers = 1
    """Number of processes, each with its own models, that build dialogues; 0: one per core."""
    shard: str | None = "auto"
    """Part of the dialogues that this process builds, if several are started with the same input and out. i/n (from 1);
    auto: by accelerate launch. The process that ends last finishes out."""
    cache: str = "~/.cache/remind"
    """Folder for indexes and codes of dialogues (8 bytes times k for each token and layer), by what they are made from,
    so that other questions and settings need no further forward pass; safe to delete."""
    device: str = "cpu"
    """Device of backbone, SAEs and text encoder; cuda: one GPU for each process in turn."""
    dtype: str = "float32"
    """Precision of the backbone."""
    overwrite: bool = False
    """Replace an existing states folder."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if isinstance(self.levels, dict) and (unknown := sorted(self.levels.keys() - {*SPLITS})):
            raise ConfigError(f"levels: {shown(unknown[0])} is no split; there are {', '.join(SPLITS)}")
        for built in map(self.levels_of, SPLITS):
            if not built or built != LEVELS[: len(built)]:
                raise ConfigError(f"levels are x0, x0 and x1, or x0, x1 and x2, not {', '.join(built) or 'none'}")
        if self.ask is not None and not (self.ask and all(text.strip() for text in self.ask)):
            raise ConfigError("ask needs one or more questions, none of them blank")

    def levels_of(self, split: str) -> tuple[str, ...]:
        """The states of a question of a split, from x0 up."""
        given = self.levels.get(split, LEVELS) if isinstance(self.levels, dict) else self.levels
        return (given,) if isinstance(given, str) else tuple(given)
