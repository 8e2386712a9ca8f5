"""The protocol of an auxiliary LLM: cues and strategies (4.2), summaries (4.4), verdicts (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    def strategy(self, dialogue: Dialogue, question: Question) -> Strategy:
        """S_str of the question: reasoning cues and anchors. Sees no gold answer and no evidence."""
        ...

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question; one after the other unless the backend can do better."""
        return [self.strategy(dialogue, question) for question in questions]

    def summary(self, state: AttentionalState) -> str:
        """G_ref = LLM(q, x1). Sees no gold answer."""
        ...

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state; one after the other unless the backend can do better."""
        return [self.summary(state) for state in states]

    def judge(self, question: str, references: Sequence[str], prediction: str) -> bool:
        """J(ŷ, y) of Eq. 9: is the prediction equivalent to any of the references?"""
        ...


def blind(question: Question) -> Question:
    """The question without answers, evidence, gold images, split and category (a category tells the unanswerable)."""
    return replace(question, answers=(), evidence=(), images=(), category=None, split=None)


def told(llm: AuxiliaryLLM, questions: Sequence[Question], kind: str) -> list[Question]:
    """The questions as given to the LLM: blind, with the dimension that they are tailored to.

    Args:
        kind: "gold": their own dimension; "infer": the one `llm` takes each for.
    """
    bare = [blind(question) for question in questions]
    if kind == "gold":
        return bare
    bare = [replace(question, dimension=None) for question in bare]
    return [replace(question, dimension=name) for question, name in zip(bare, llm.kinds(bare), strict=True)]


def blind_state(state: AttentionalState) -> AttentionalState:
    """x1 of the question as given to the LLM."""
    factual = state.factual
    return replace(state, factual=replace(factual, question=factual.told or blind(factual.question)))
