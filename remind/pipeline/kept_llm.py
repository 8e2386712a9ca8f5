"""An auxiliary LLM whose strategies and summaries are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue, Question
from remind.pipeline.identity import dialogue_hash
from remind.pipeline.shelf import Kept
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.blind import blind
from remind.states.pyramid import AttentionalState, Segment, Strategy, render


class KeptLLM(AuxiliaryLLM):
    """For the offline stand-in: chat models keep their replies themselves, and their books with them.

    Cues are passed through; a dialogue's index keeps them.
    """

    def __init__(self, llm: AuxiliaryLLM, kept: Kept) -> None:
        self.llm, self.kept = llm, kept

    @property
    def name(self) -> str:
        return self.llm.name

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        return self.llm.cues(dialogue, segments, dimension)

    def strategy(self, dialogue: Dialogue, question: Question) -> Strategy:
        return self.strategies(dialogue, [question])[0]

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        key = sha256_json([self.name, dialogue_hash(dialogue), [asdict(blind(question)) for question in questions]])
        found = self.kept.get("strategies", key)
        if found is None:
            made = self.llm.strategies(dialogue, questions)
            self.kept.put("strategies", key, [asdict(strategy) for strategy in made])
            return made
        return [Strategy(**{name: tuple(items) for name, items in one.items()}) for one in found]

    def summary(self, state: AttentionalState) -> str:
        return self.summaries([state])[0]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state; the stand-in reads the whole dialogue for the rarity of its words."""
        dialogues = {id(state.factual.dialogue): dialogue_hash(state.factual.dialogue) for state in states}
        asked = [
            [render(state).text, state.salience, asdict(blind(state.factual.question)), list(dialogues.values())]
            for state in states
        ]
        key = sha256_json([self.name, asked])
        found = self.kept.get("summaries", key)
        if found is None:
            found = self.llm.summaries(states)
            self.kept.put("summaries", key, found)
        return [str(text) for text in found]

    def judge(self, question: str, references: Sequence[str], prediction: str) -> bool:
        return self.llm.judge(question, references, prediction)
