"""The protocol of an auxiliary LLM: cues and strategies (4.2), summaries (4.4), verdicts (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from remind.data.dialogue import Dialogue, Question
from remind.states.pyramid import AttentionalState, Segment, Strategy

#: What the memory systems ask for; they share one endpoint.
MemoryStage = Literal[
    "extract",
    "update",
    "facts",
    "keyphrases",
    "summaries",
    "events",
    "time_range",
    "note",
    "read",
    "memory",
    "compress",
    "profile",
]
#: What a request is made for; costs are counted by it, and each but those of memory may have an endpoint of its own.
Stage = Literal["cues", "strategy", "summary", "judge", "answer", "questions", "explain", MemoryStage]


@dataclass(frozen=True)
class Failure:
    """What could not be had from a model.

    Attributes:
        stage: cues, strategy, summary, judge or explain.
        sample: the question, the segment, or the feature.
        failure: as in `remind.llm.request.Reply`, or "unusable" (not what was asked for), "neither" (no verdict).
        message: the same in a line.
    """

    stage: Stage
    sample: str
    failure: str
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one case.

    Attributes:
        value: whether the prediction means the same as a reference; None: there is no verdict, for or against.
        failure: why there is none: as in `remind.llm.request.Reply`, or "neither" where the reply is neither verdict.
        message: the same in a line.
    """

    value: bool | None
    failure: str | None = None
    message: str = ""


class AuxiliaryLLM(Protocol):
    """One backend. Implementations are deterministic for equal input, or cache, so that a rebuild changes nothing.

    Attributes:
        failures: grows with every item that somebody else had to write, or that has no verdict; index and manifest
            tell by it what is not this LLM's own.
    """

    failures: Sequence[Failure] = ()

    @property
    def name(self) -> str:
        """Identifies backend, model and prompts; goes into manifests and cache keys."""
        ...

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """The dimension each question is taken for by its text and options, None: a plain factual question."""
        ...

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n for each segment, tailored to the dimension (None: a plain factual question)."""
        ...

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question: reasoning cues and anchors. Sees no gold answer and no evidence."""
        ...

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref = LLM(q, x1) of each state. Sees no gold answer."""
        ...

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """J(ŷ, y) of Eq. 9 for each (question, references, prediction): is it equivalent to any of the references?

        Args:
            samples: ids the costs are reported by, one for each case.
        """
        ...
