"""Settings of evidence state perception (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from sae.ranges import FiniteFloat, NonNegativeInt, PositiveInt, PositiveShare, check_ranges


@dataclass
class SegmentConfig:
    """How a session is cut into segments."""

    max_tokens: PositiveInt | None = 128
    """A segment of more tokens is cut further, at its deepest dips; a single longer turn stays a segment of its own.
    None: no cap."""
    min_turns: PositiveInt = 2
    """A dip that would leave fewer turns on a side is no boundary, unless the token cap asks for one there."""
    window: PositiveInt = 3
    """How many turns on each side of a gap are compared."""
    depth: FiniteFloat = 0.5
    """A dip is a boundary from this many standard deviations above the mean depth of the dialogue's gaps."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class RetrieveConfig:
    """What is retrieved, and how much of it."""

    method: Literal["cue", "hybrid"] = "cue"
    """cue: Eq. 1, the segments whose cues are closest to the question. hybrid: turns by BM25 and sentence vectors
    together, merged into segments, within the tokens Eq. 1 would spend."""
    top_share: PositiveShare = 0.2
    """Share of the dialogue's segments to keep; ceil(top_share × N) of them."""
    max_context_tokens: PositiveInt | None = None
    """Cap on the dialogue section of the prompt, in tokens of the sentence encoder; the lowest segments go first. None:
    no cap, as in the paper, but that build-states leaves a backbone that reads all of x0 at once (context_codes joint)
    a quarter of its context for the rest. A fifth of RefMem-Bench's average history (27,388 words, Table 2) is about
    7,200 tokens, which the paper does not name."""
    whole_tokens: NonNegativeInt = 1000
    """A dialogue of at most so many tokens that also fits the cap is kept whole; 0: top_share holds for every one.
    Shares are meant for long histories; of a chat of three sessions they would keep one."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class PerceptionConfig:
    """How x0 is built (Section 4.2)."""

    segment: SegmentConfig = field(default_factory=SegmentConfig)
    """How sessions are cut into segments."""
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    """What is retrieved for a question."""
    kind: Literal["gold", "infer"] = "gold"
    """The kind of question that cues, strategies and summaries are tailored to. gold: its dimension in the benchmark,
    as in the paper. infer: the dimension that the LLM (endpoint of stage strategy; offline: a rule) reads from question
    and options alone, as has to be done where no benchmark tells. The form in which evidence is asked for stays the
    gold one's."""
