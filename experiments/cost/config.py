"""Settings of the cost of inference."""

from __future__ import annotations

from dataclasses import dataclass, field

from remind.core.errors import ConfigError
from sae.ranges import NonNegativeInt, PositiveInt, PositiveShare, check_ranges


@dataclass
class TokenSizes:
    """Lengths in tokens of everything but the history. Those of segments, turns and cues are about LoCoMo's."""

    instructions: PositiveInt = 140
    """Instructions of the answer prompt."""
    question: PositiveInt = 80
    """Question with its options and the turn's end in the answer prompt."""
    query: PositiveInt = 16
    """Question as the text encoder reads it, its special tokens included."""
    strategy_request: PositiveInt = 480
    """Prompt of the strategy call without the question; the dialogue is no part of it."""
    strategy: PositiveInt = 200
    """The strategy: what the call writes, and what stands in x0."""
    segment: PositiveInt = 85
    """Mean length of a segment."""
    turn: PositiveInt = 40
    """Mean length of a turn."""
    cue_request: PositiveInt = 320
    """Prompt of a cue call without the segment."""
    cue: PositiveInt = 75
    """Mean length of a cue."""
    markers: PositiveInt = 130
    """What x1 has beyond x0: markers and their reminder."""
    summary_request: PositiveInt = 440
    """Prompt of the summary call without x1."""
    summary: PositiveInt = 300
    """The summary: what the call writes, and what stands in x2."""
    answer: PositiveInt = 150
    """The reply: answer, quoted evidence and end token."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class InferenceCostConfig:
    """Operations and LLM calls per question against the length of the history; no weights are loaded."""

    out: str
    """Folder for results.json, table.md and inference_cost.png; those of an earlier run are replaced."""
    model: str = "qwen3-vl-8b"
    """Model that answers: qwen3-vl-8b, qwen3-vl-2b, nano, or a Hugging Face folder (only its config.json is read)."""
    auxiliary: str | None = "qwen3-vl-8b"
    """Model whose shape the auxiliary LLM is charged with; None: its calls are counted, their operations are not."""
    lengths: tuple[PositiveInt, ...] = tuple(2**power for power in range(14, 22))
    """Tokens of the history; ascending."""
    top_share: PositiveShare = 0.2
    """Share of the history that retrieval keeps."""
    max_context_tokens: PositiveInt = 7200
    """Cap on the retrieved tokens in x0. Ours: a fifth of RefMem-Bench's average history; the paper names none."""
    questions: tuple[PositiveInt, ...] = (1, 100)
    """Over how many questions about the dialogue one index, or one prefill of the whole history, is spread."""
    dimensions: PositiveInt = 8
    """Kinds of question the index holds cues for: one call for each segment and kind."""
    sae_layers: tuple[NonNegativeInt, ...] = (7, 14, 22, 29)
    """Hidden states the SAEs of x1 read; the forward for them stops after the last."""
    d_sae: PositiveInt = 4096
    """Features of an SAE."""
    sizes: TokenSizes = field(default_factory=TokenSizes)
    """Lengths of everything but the history."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.lengths, self.questions = tuple(self.lengths), tuple(self.questions)
        self.sae_layers = tuple(self.sae_layers)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths must be ascending numbers, not {list(self.lengths)}")
        if not self.sae_layers:
            raise ConfigError("sae_layers must name one hidden state or more")
        if len(set(self.questions)) < len(self.questions):
            raise ConfigError(f"questions names a number twice: {list(self.questions)}")
