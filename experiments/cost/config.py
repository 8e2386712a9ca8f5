"""Settings of the cost of inference."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from remind.core.errors import ConfigError


@dataclass
class TokenSizes:
    """Lengths in tokens of everything but the history. Those of segments, turns and cues are about LoCoMo's."""

    instructions: int = 140
    """Instructions of the answer prompt."""
    question: int = 80
    """Question with its options and the turn's end in the answer prompt."""
    query: int = 16
    """Question as the text encoder reads it, its special tokens included."""
    strategy_request: int = 480
    """Prompt of the strategy call without the question; the dialogue is no part of it."""
    strategy: int = 200
    """The strategy: what the call writes, and what stands in x0."""
    segment: int = 85
    """Mean length of a segment."""
    turn: int = 40
    """Mean length of a turn."""
    cue_request: int = 320
    """Prompt of a cue call without the segment."""
    cue: int = 75
    """Mean length of a cue."""
    markers: int = 130
    """What x1 has beyond x0: markers and their reminder."""
    summary_request: int = 440
    """Prompt of the summary call without x1."""
    summary: int = 300
    """The summary: what the call writes, and what stands in x2."""
    answer: int = 150
    """The reply: answer, quoted evidence and end token."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"sizes.{name} must be at least 1, not {value}")


@dataclass
class InferenceCostConfig:
    """Operations and LLM calls per question against the length of the history; no weights are loaded."""

    out: str
    """Folder for results.json, table.md and inference_cost.png; those of an earlier run are replaced."""
    model: str = "qwen3-vl-8b"
    """Model that answers: qwen3-vl-8b, qwen3-vl-2b, nano, or a Hugging Face folder (only its config.json is read)."""
    auxiliary: str | None = "qwen3-vl-8b"
    """Model whose shape the auxiliary LLM is charged with; None: its calls are counted, their operations are not."""
    lengths: tuple[int, ...] = tuple(2**power for power in range(14, 22))
    """Tokens of the history; ascending."""
    top_share: float = 0.2
    """Share of the history that retrieval keeps."""
    max_context_tokens: int = 7200
    """Cap on the retrieved tokens in x0."""
    questions: tuple[int, ...] = (1, 100)
    """Over how many questions about the dialogue one index, or one prefill of the whole history, is spread."""
    dimensions: int = 8
    """Kinds of question the index holds cues for: one call for each segment and kind."""
    sae_layers: tuple[int, ...] = (7, 14, 22, 29)
    """Hidden states the SAEs of x1 read; the forward for them stops after the last."""
    d_sae: int = 4096
    """Features of an SAE."""
    sizes: TokenSizes = field(default_factory=TokenSizes)
    """Lengths of everything but the history."""

    def __post_init__(self) -> None:
        self.lengths, self.questions = tuple(self.lengths), tuple(self.questions)
        self.sae_layers = tuple(self.sae_layers)
        if not self.lengths or min(self.lengths) < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths must be ascending numbers of at least 1, not {list(self.lengths)}")
        if not 0 < self.top_share <= 1:
            raise ConfigError(f"top_share {self.top_share} must be above 0 and at most 1")
        if min(self.max_context_tokens, self.dimensions, self.d_sae, *self.questions) < 1:
            raise ConfigError("max_context_tokens, dimensions, d_sae and questions must be at least 1")
        if not self.sae_layers or min(self.sae_layers) < 0:
            raise ConfigError("sae_layers must name one hidden state or more, 0 or above")
        if len(set(self.questions)) < len(self.questions):
            raise ConfigError(f"questions names a number twice: {list(self.questions)}")
