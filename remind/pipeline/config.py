"""Settings of `remind build-states`."""

from __future__ import annotations

from dataclasses import dataclass, field

from remind.core.errors import ConfigError
from remind.data.split import SplitConfig
from remind.grounding import GroundingConfig
from remind.llm.endpoints import LLMConfig
from remind.perception import PerceptionConfig
from sae.ranges import PositiveInt, Share, Workers, check_ranges

#: What takes long to import and every process of a build needs.
LIBRARIES = ("remind.pipeline.workers", "sentence_transformers", "transformers")


@dataclass
class BuildStatesConfig:
    """Build x0, x1 and x2 for every question of a corpus."""

    input: str | list[str]
    """File or folder of dialogues with questions; a list of several is merged."""
    out: str
    """Folder for the states (part-*.parquet and manifest.json). One that was built from the same input with the same
    settings is left as it is; any other must not exist unless overwrite is set."""
    ask: list[str] | None = None
    """Questions of your own about each dialogue, in place of those of the input: --ask "Who …?" --ask "When …?". They
    have no gold answer, and their split is test."""
    abstention: bool | None = None
    """Whether prompts of direct questions say what to answer where the conversation does not tell. None: where some
    question of the input has that answer (LoCoMo, LongMemEval), and with ask. It holds for all questions alike. A model
    is best asked as it was trained: nano knows prompts that say so."""
    backbone: str = "minilm"
    """Model whose hidden states the SAEs read: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    sae: str | None = None
    """Folder of trained SAEs (from `remind train-sae`). None: a small one is trained on sae_data first, and cached."""
    sae_data: str | list[str] | None = None
    """Dialogues to train that small SAE on; they should share nothing with the input. None: synthetic small talk."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml) for JSON of another shape; None: recognised from the content."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Who writes cues, strategies and summaries: chat models, or the offline stand-in for those without an endpoint."""
    max_failed: Share = 0.1
    """Share of a stage's requests that may fail, each then written by the stand-in; beyond it nothing is built."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Train, dev and test."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    workers: Workers = 1
    """Processes, each with models of its own, that dialogues are dealt out to; 0: one for every core."""
    shard: str | None = "auto"
    """Which dialogues this process builds where several are started on the same input, out and cache: i/n (from 1);
    slurm: the task of a job array or step; auto: what accelerate launch says. The one that ends last writes out."""
    cache: str = "~/.cache/remind"
    """Folder for what every stage has made, by the hash of its content; safe to delete. Shards must share it."""
    keep_codes: bool = True
    """Keep the sparse codes of dialogues in the cache, too (8 bytes times k for each token and layer); other questions
    and other settings then need no forward of theirs."""
    device: str = "cpu"
    """Device of backbone, SAEs and text encoder; cuda: one GPU for each process in turn."""
    dtype: str = "float32"
    """Precision of the backbone."""
    overwrite: bool = False
    """Replace an existing states folder."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.ask is not None and not (self.ask and all(text.strip() for text in self.ask)):
            raise ConfigError("ask needs one or more questions, none of them blank")

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def sae_inputs(self) -> list[str]:
        return [] if self.sae_data is None else [self.sae_data] if isinstance(self.sae_data, str) else self.sae_data
