"""Settings of the experiments on memory systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from remind.memory.citers import USEFUL, USELESS
from remind.memory.reranker import RerankerConfig
from sae.ranges import PositiveInt, Seed, Share, check_ranges


@dataclass
class MemoryExperimentConfig:
    """Recall of gold evidence turns by a memory system, with the tokens of what it retrieves."""

    item: Literal["reranker"]
    """What is measured. reranker: learning from citations, on held-out dialogues and online."""
    data: str | list[str]
    """Dialogue files or folders with questions and gold evidence, each a dataset of its own. On the first one dialogues
    are held out in turn; what is learned on all of it is applied to the others, whose questions train nothing."""
    out: str
    """JSON file for the result; the learning curve is written beside it as PNG."""
    reranker: RerankerConfig = field(default_factory=RerankerConfig)
    """The reranker over dense candidates. Over hybrid ones only `candidates` and, if set, `lr` differ."""
    updates: PositiveInt = 500
    """Updates before held-out dialogues are ranked."""
    curve: PositiveInt = 1000
    """Updates of the learning curve; at least `updates`."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Of the order of questions and the noise. The recall of a question is the mean over them."""
    cited_useful: Share = USEFUL
    """Noisy citer: probability that it cites a memory that holds evidence. RMM's Table 3, recall of the useful ones."""
    cited_useless: Share = USELESS
    """And one that holds none: what is left of their recall there."""
    resamples: PositiveInt = 2000
    """Resamples of the dialogues behind each 95 % interval."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    cache: str = "~/.cache/remind"
    """Folder for the vectors of turns; safe to delete."""
    device: str = "cpu"
    """Where the sentence encoder runs."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if not self.seeds:
            raise ConfigError("seeds: at least one is needed")
        if self.curve < self.updates:
            raise ConfigError(f"curve must be at least updates, not {self.curve} < {self.updates}")
