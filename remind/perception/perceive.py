"""Dialogue and question to x0 = [C_ret, S_str] (Section 4.2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remind.core.errors import DataError
from remind.core.progress import part
from remind.data.dialogue import Dialogue, Question
from remind.perception.config import PerceptionConfig
from remind.perception.index import DialogueIndex
from remind.perception.retrieve import retrieve
from remind.states.auxiliary import AuxiliaryLLM, told
from remind.states.pyramid import FactualState
from remind.text.strategy import check_dimension

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

#: Dialogues whose index stays in memory; questions come dialogue by dialogue.
_CACHED_INDEXES = 2


class Perception:
    """Builds factual states; each dialogue is indexed once and read by all its questions.

    Args:
        config: segmentation and retrieval.
        encoder: φ.
        llm: writes cues and strategies. It is given questions without any gold.
        cache: folder of the indexes; None: in memory only.
    """

    def __init__(
        self, config: PerceptionConfig, encoder: SentenceEncoder, llm: AuxiliaryLLM, cache: Path | None = None
    ) -> None:
        self.config, self.encoder, self.llm, self.cache = config, encoder, llm, cache
        # keyed by identity: hashing a dialogue's content takes longer than a retrieval
        self._indexes: OrderedDict[int, DialogueIndex] = OrderedDict()

    def index(self, dialogue: Dialogue) -> DialogueIndex:
        """The dialogue's index: from memory, else read from the cache, else built and written there."""
        index = self._indexes.get(id(dialogue))
        if index is None or index.dialogue is not dialogue:
            index = DialogueIndex(dialogue, self.encoder, self.llm, self.config.segment, self.cache)
            self._indexes[id(dialogue)] = index
            while len(self._indexes) > _CACHED_INDEXES:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(id(dialogue))
        return index

    def perceive(self, dialogue: Dialogue, question: Question, abstention: bool = True) -> FactualState:
        """x0 = [C_ret, S_str] of the question. Neither part depends on the question's gold.

        Args:
            abstention: as in `FactualState`.

        Raises:
            DataError: an empty question, an unknown dimension, or a question about another dialogue.
        """
        return self.perceive_all(dialogue, [question], abstention)[0]

    def told(self, questions: Sequence[Question]) -> list[Question]:
        """The questions without gold, with the dimension that perception takes each for."""
        return told(self.llm, questions, self.config.kind)

    def perceive_all(
        self,
        dialogue: Dialogue,
        questions: Sequence[Question],
        abstention: bool = True,
        told: Sequence[Question] | None = None,
    ) -> list[FactualState]:
        """x0 of each question, as `perceive`; the LLM is asked for all strategies at once.

        Args:
            told: what `told` gives, where it is known already.
        """
        for question in questions:
            if not question.text.strip():
                raise DataError("the question has no text", record=question.id)
            if question.dialogue_id != dialogue.id:
                raise DataError(f"it is about {question.dialogue_id!r}, not {dialogue.id!r}", record=question.id)
            check_dimension(question.dimension)
        told = self.told(questions) if told is None else told
        index = self.index(dialogue)
        retrieved = []
        for number, question in enumerate(told):
            with part(number / len(questions), (number + 1) / len(questions)):
                # one at a time: vectors differ in the last bits with the batch they were encoded in
                vector = self.encoder.encode([question.text])[0]
                retrieved.append(retrieve(index, question.text, vector, question.dimension, self.config.retrieve))
        strategies = self.llm.strategies(dialogue, told)
        inferred = self.config.kind == "infer"
        return [
            FactualState(
                dialogue, question, found.segments, strategy, abstention, known if inferred else None, found.capped
            )
            for question, found, strategy, known in zip(questions, retrieved, strategies, told, strict=True)
        ]
