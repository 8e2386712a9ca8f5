"""Dialogue and question to x0 = [C_ret, S_str] (Section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question
from remind.perception.config import PerceptionConfig
from remind.perception.index import DialogueIndex
from remind.perception.retrieve import retrieve
from remind.states.auxiliary import AuxiliaryLLM, told
from remind.states.pyramid import FactualState
from remind.text.strategy import check_dimension

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


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
        self._index: DialogueIndex | None = None

    def index(self, dialogue: Dialogue) -> DialogueIndex:
        """The dialogue's index: that of the last call, else read from the cache, else built and written there."""
        if self._index is None or self._index.dialogue is not dialogue:
            self._index = DialogueIndex(dialogue, self.encoder, self.llm, self.config.segment, self.cache)
        return self._index

    def perceive(
        self, dialogue: Dialogue, questions: Sequence[Question], abstention: bool = True
    ) -> list[FactualState]:
        """x0 = [C_ret, S_str] of each question. Neither part depends on the questions' gold.

        Args:
            abstention: as in `FactualState`.

        Raises:
            DataError: an empty question, an unknown dimension, or a question about another dialogue.
        """
        for question in questions:
            if not question.text.strip():
                raise DataError("the question has no text", record=question.id)
            if question.dialogue_id != dialogue.id:
                raise DataError(f"it is about {question.dialogue_id!r}, not {dialogue.id!r}", record=question.id)
            check_dimension(question.dimension)
        asked = told(self.llm, questions, self.config.kind)
        index = self.index(dialogue)
        # one at a time: vectors differ in the last bits with the batch they were encoded in
        vectors = [self.encoder.encode([question.text])[0] for question in asked]
        retrieved = [
            retrieve(index, question.text, vector, question.dimension, self.config.retrieve)
            for question, vector in zip(asked, vectors, strict=True)
        ]
        strategies = self.llm.strategies(dialogue, asked)
        inferred = self.config.kind == "infer"
        return [
            FactualState(
                dialogue, question, found.segments, strategy, abstention, known if inferred else None, found.capped
            )
            for question, found, strategy, known in zip(questions, retrieved, strategies, asked, strict=True)
        ]
