"""What to evaluate, as configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from remind.evaluation.names import expand
from remind.llm.endpoints import LLMConfig


@dataclass
class ContextConfig:
    """What the conditions show that are built from the dialogue files. Tokens are of the sentence encoder."""

    full_tokens: int = 30000
    """full_context: cap on the dialogue; whole turns beyond it are cut, and counted."""
    keep: Literal["newest", "oldest"] = "newest"
    """full_context: which turns stay where the dialogue is cut."""
    chunk_tokens: int = 200
    """rag: length of a chunk; whole turns, none across sessions. MiniLM reads 254 tokens of a text."""
    rag_tokens: int | None = None
    """rag: cap on the chunks together; None: as many as x0 shows of the same dialogue for the same question."""

    def __post_init__(self) -> None:
        for name in ("full_tokens", "chunk_tokens", "rag_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"context: {name} must be at least 1, not {value}")
        if self.keep not in ("newest", "oldest"):
            raise ConfigError(f"context: keep is newest or oldest, not {self.keep!r}")


@dataclass
class EvaluateConfig:
    """Answer the questions of a split under one or more conditions, judge the answers, write the report."""

    states: str
    """Folder of states (from build_states.py)."""
    model: str
    """Model that answers: nano, or a Hugging Face folder or id, such as an exported checkpoint. With answers server:
    a name for the report."""
    out: str
    """Folder for predictions.jsonl, verdicts.jsonl, report.json, report.html and report.md; of several conditions each
    has a folder of its own in it. A run that was stopped is resumed."""
    split: Literal["train", "dev", "test"] = "test"
    """Questions to answer."""
    level: Literal["x0", "x1", "x2"] = "x0"
    """The one condition, where conditions names none: a state to answer from. x0 is what inference sees."""
    conditions: list[str] = field(default_factory=list)
    """What to answer from, side by side: x0, x1, x2, evidence, altered, no_context, full_context, oracle, rag,
    always_a, most_frequent, abstain; or a set of them: layers, ladder, baselines, controls, all."""
    stage: Literal["all", "answer", "judge", "report"] = "all"
    """Stage to run. judge and report read what the stages before them left in out, and load no answering model."""
    answers: Literal["local", "server"] = "local"
    """local: the model answers here, in batches. server: the endpoint llm.answer does."""
    max_new_tokens: int = 512
    """Room for answer and explanation; an output that is cut off is scored as it stands, and counted."""
    batch_size: int = 8
    """Prompts per forward. Changes the speed, not the answers."""
    limit: int | None = None
    """At most this many questions, spread evenly over the split; for a quick look."""
    judge: Literal["offline", "llm"] = "offline"
    """Judge of direct answers: offline, a rule; llm: the endpoint llm.judge."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoints: answer (answers server), judge (judge llm), summary (condition altered)."""
    corpus: list[str] = field(default_factory=list)
    """Dialogue files that the states were built from; full_context, oracle, rag and altered need them."""
    corpus_format: str | None = None
    """Format of those files; None: recognised from the content."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """What full_context and rag show."""
    encoder: str = "minilm"
    """Sentence encoder of text memory recall (Eq. 10), of rag, and of token caps."""
    bootstrap: int = 1000
    """Resamples behind each interval that is not of a share."""
    seed: int = 0
    """Of the resampling; answers are greedy and need none."""
    device: str = "cpu"
    """Where the model runs, e.g. cpu or cuda:0."""
    dtype: str = "float32"
    """Precision of the model: float32, bfloat16, float16 or auto."""
    examples: int = 12
    """Wrong answers shown in the report, with the evidence found and missed; and as many failures."""
    overwrite: bool = False
    """Drop what an earlier run left in out and start again."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("bootstrap", 1), ("examples", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.overwrite and self.stage in ("judge", "report"):
            raise ConfigError(f"overwrite would drop the answers that stage {self.stage} reads; leave one of them out")
        _ = self.names

    @property
    def names(self) -> tuple[str, ...]:
        """The conditions asked for, sets spelled out, each once."""
        return expand(self.conditions or [self.level])
