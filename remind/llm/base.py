"""What the pipeline asks of an auxiliary LLM: cues and strategies (4.2), summaries (4.4), verdicts (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from remind.dialogue import Dialogue, Question
from remind.pyramid import AttentionalState, Segment, Strategy


class AuxiliaryLLM(Protocol):
    """One backend. Implementations are deterministic for equal input, or cache, so that a rebuild changes nothing."""

    @property
    def name(self) -> str:
        """Identifies backend, model and prompts; goes into manifests and cache keys."""
        ...

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n for each segment, tailored to the dimension (None: a plain factual question)."""
        ...

    def strategy(self, dialogue: Dialogue, question: Question) -> Strategy:
        """S_str of the question: reasoning cues and anchors. Sees no gold answer and no evidence."""
        ...

    def summary(self, state: AttentionalState) -> str:
        """G_ref = LLM(q, x1). Sees no gold answer."""
        ...

    def judge(self, question: str, references: Sequence[str], prediction: str) -> bool:
        """J(ŷ, y) of Eq. 9: is the prediction equivalent to any of the references?"""
        ...
