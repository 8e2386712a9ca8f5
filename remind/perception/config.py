"""Settings of evidence state perception (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError


@dataclass
class SegmentConfig:
    """How a session is cut into segments."""

    max_tokens: int = 128
    """A segment of more tokens is cut further, at its deepest dips; a single longer turn stays a segment of its own."""
    min_turns: int = 2
    """A dip that would leave fewer turns on a side is no boundary, unless the token cap asks for one there."""
    window: int = 3
    """How many turns on each side of a gap are compared."""
    depth: float = 0.5
    """A dip is a boundary from this many standard deviations above the mean depth of the dialogue's gaps."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.min_turns < 1 or self.window < 1:
            raise ConfigError("segment: max_tokens, min_turns and window must be at least 1")


@dataclass
class RetrieveConfig:
    """What is retrieved, and how much of it."""

    method: Literal["cue", "hybrid"] = "cue"
    """cue: Eq. 1, the segments whose cues are closest to the question. hybrid: turns by BM25 and sentence vectors
    together, merged into segments, within the tokens Eq. 1 would spend."""
    top_share: float = 0.2
    """Share of the dialogue's segments to keep; ceil(top_share × N) of them."""
    max_context_tokens: int = 7200
    """Cap on the dialogue section of the prompt, in tokens of the sentence encoder; the lowest segments go first."""
    whole_tokens: int = 1000
    """A dialogue of at most so many tokens that also fits the cap is kept whole; 0: top_share holds for every one.
    Shares are meant for long histories; of a chat of three sessions they would keep one."""
    sigma: float = 2.5
    """hybrid: width in turns of the Gaussian that mixes a turn's scores with those of its neighbours in the session."""
    lexical_context: float = 0.8
    """hybrid: share of the BM25 score that comes from that neighbourhood; the rest is the turn's own."""
    dense_context: float = 0.3
    """hybrid: the same for the cosine."""

    def __post_init__(self) -> None:
        if self.method not in ("cue", "hybrid"):
            raise ConfigError(f"retrieve: no method {self.method!r}; there are cue and hybrid")
        if not 0 < self.top_share <= 1:
            raise ConfigError(f"retrieve: top_share {self.top_share} must be above 0 and at most 1")
        if self.max_context_tokens < 1:
            raise ConfigError("retrieve: max_context_tokens must be at least 1")
        if self.whole_tokens < 0:
            raise ConfigError("retrieve: whole_tokens must be 0 or more")
        if self.sigma < 0 or not 0 <= self.lexical_context <= 1 or not 0 <= self.dense_context <= 1:
            raise ConfigError("retrieve: sigma must not be negative, and the context shares lie between 0 and 1")


@dataclass
class PerceptionConfig:
    """How x0 is built (Section 4.2)."""

    segment: SegmentConfig = field(default_factory=SegmentConfig)
    """How sessions are cut into segments."""
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    """What is retrieved for a question."""
