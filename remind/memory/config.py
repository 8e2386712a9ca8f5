"""Settings of `remind run-memory` and `remind score-memory`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from remind.core.errors import ConfigError
from remind.llm.endpoints import EndpointConfig, LLMConfig
from sae.ranges import NonNegativeInt, PositiveInt, Resamples, Seed, Share, check_ranges

#: Controls in every table: no memories, everything that fits, and the gold evidence.
CONTROLS = ("no_context", "full_context", "gold")


@dataclass
class Limit:
    """How much of what a system gives is read."""

    k: PositiveInt | None = None
    """Memories."""
    budget: PositiveInt | None = None
    """Tokens of memories."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class RunMemoryConfig:
    """Run several memory systems on the same dialogues, and record what each stores, retrieves and costs."""

    input: str | list[str]
    """File or folder of dialogues with questions; a list of several is merged."""
    out: str
    """Folder of the run. An existing run with the same settings is continued."""
    systems: list[str] = field(default_factory=lambda: ["dense", "bm25", "hybrid", "session"])
    """Memory systems, by name; no_context, full_context and gold are always included. A name of one's own needs
    `system` among its options."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of systems by name, e.g. --options '{lme_facts: {value: session}, two: {system: mem0, batch: 4}}'."""
    models: dict[str, EndpointConfig] = field(default_factory=dict)
    """Chat models of single systems by name, in place of llm's: for what they ask and for their answers."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml); None: recognised from the content."""
    k: list[PositiveInt] = field(default_factory=lambda: [1, 3, 5, 10, 30, 50])
    """Numbers of memories at which recall is measured."""
    budgets: list[PositiveInt] = field(default_factory=lambda: [800, 3200, 7200])
    """Numbers of tokens of memories at which recall is measured."""
    answer_k: PositiveInt = 10
    """Memories that a reader answers from, as far as budget_tokens allows."""
    budget_tokens: PositiveInt | None = None
    """Tokens of memories that a reader gets instead of answer_k memories, so that all contexts have the same length."""
    limits: dict[str, Limit] = field(default_factory=dict)
    """What single systems answer from, by name, in place of answer_k and budget_tokens; {}: all that the system gives.
    E.g. --limits '{amem: {k: 10}, remind: {budget: 7600}, gam: {}}'."""
    full_tokens: PositiveInt = 16_000
    """Length of full_context in tokens; the newest turns are kept."""
    reader: Literal["direct", "con", "cite", "respond", "x0"] = "direct"
    """How answers are asked for: directly, after notes (Chain-of-Note), with citations, as a reply to the person, in
    sentences, or by the prompt of a factual state without a strategy (x0), for models that were trained on states."""
    citer: Literal["none", "reader", "oracle", "noisy", "lexical"] = "reader"
    """Source of the citations that learning systems get after each question. none; reader: the reader's own citations
    (with reader cite); oracle, noisy: gold evidence, exact or with errors, which every report states; lexical: shared
    words. Every run starts without anything learned."""
    judge: Literal["offline", "llm", "longmemeval", "p13n"] = "offline"
    """Judge of direct answers. offline: a rule; llm: the endpoint llm.judge; longmemeval: that endpoint, in one of five
    roles by LongMemEval's question types; p13n: that endpoint, also on how an answer uses the memory and which stage
    caused a wrong answer (SaliMory, Appendix B)."""
    export: Literal["none", "official"] = "none"
    """official: write each system's answers as LongMemEval's hypothesis file, too, with the verdicts of its judge:
    hypotheses.jsonl in the system's folder."""
    max_failed: Share = 0.1
    """Largest share of a system's requests for a dialogue that may be lost; above it the dialogue counts as failed."""
    encoder: str = "minilm"
    """Sentence encoder that all systems share: minilm, or a sentence-transformers folder or id."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Chat models that write memories and answers; without an endpoint, steps that need one are skipped."""
    split: Literal["train", "dev", "test"] | None = None
    """Ask only the questions of this split; None: all."""
    states: str | None = None
    """States folder (from `remind build-states`) that defines the split of each question; None: the input does."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, spread evenly over it; for a quick look."""
    dialogues: PositiveInt | None = None
    """At most this many dialogues, the first ones."""
    shown: NonNegativeInt = 5
    """Memories of each question whose text the page shows."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if reserved := sorted({*self.systems} & {*CONTROLS}):
            raise ConfigError(f"{reserved[0]} is always included; leave it out")
        for name in ("options", "models", "limits"):
            if unused := sorted({*getattr(self, name)} - {*self.systems}):
                raise ConfigError(f"{name} are given for {unused[0]}, which is not in systems")
        for endpoint in self.models.values():
            endpoint.check()
        if self.states is not None and self.split is None:
            raise ConfigError("states defines the split of each question; set split to the one to ask")
        if not self.k and not self.budgets:
            raise ConfigError("k, budgets or both must be set, since recall is measured at them")

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else list(self.input)

    def llm_of(self, system: str) -> LLMConfig:
        """Whom a system asks; verdicts on all come from one judge."""
        if (own := self.models.get(system)) is None:
            return self.llm
        given: dict[str, Any] = {one.name: own for one in fields(LLMConfig) if one.name not in ("cache", "dry_run")}
        return replace(self.llm, **given | {"judge": self.llm.endpoint("judge")})


@dataclass
class ScoreMemoryConfig:
    """Score runs of memory systems: evidence recall, answers, costs, and differences between systems."""

    runs: str
    """Folder of a run, or of several."""
    out: str
    """JSON file for the scores; a page of the same name is written beside it (.html)."""
    resamples: Resamples = 2000
    """Resamples of dialogues for the intervals."""
    seed: Seed = 0
    """Of the resamples."""
