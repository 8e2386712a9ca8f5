"""Which turns of a dialogue a condition shows within a cap on tokens: all of them, or naive chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.data.dialogue import Dialogue, Question
from remind.perception.perceive import Costs, prompt_costs
from remind.states.pyramid import turn_text

if TYPE_CHECKING:
    from remind.evaluation.config import ContextConfig
    from remind.models.encoder import SentenceEncoder


@dataclass
class _Measured:
    """Token counts of a dialogue, and its chunks with their vectors once they are needed."""

    dialogue: Dialogue
    costs: Costs
    chunks: list[range] | None = None
    vectors: Tensor | None = None


class Contexts:
    """Choices of turns, as ascending positions in `Dialogue.turns`. Tokens are those of the encoder's vocabulary.

    Args:
        encoder: counts tokens; its cosine ranks chunks.
        config: caps.
    """

    def __init__(self, encoder: SentenceEncoder, config: ContextConfig) -> None:
        self.encoder, self.config = encoder, config
        # of the last dialogue: questions come dialogue by dialogue
        self._measured: _Measured | None = None

    def full(self, dialogue: Dialogue) -> list[int]:
        """Every turn, or as many of the newest (oldest) as fit `full_tokens` together; at least one."""
        measured, turns = self._measure(dialogue), range(len(dialogue.turns))

        def first(count: int) -> range:
            return turns[-count:] if self.config.keep == "newest" else turns[:count]

        def cost(count: int) -> int:
            return measured.costs.of(first(count))

        return list(first(max(1, bisect_right(range(1, len(turns) + 1), self.config.full_tokens, key=cost))))

    def rag(self, dialogue: Dialogue, question: Question, shown: Sequence[int]) -> list[int]:
        """The chunks with the highest cosine to the question (ties: earlier first) up to the first that does not fit.

        Args:
            shown: positions that x0 shows; what they cost is the cap where `rag_tokens` is None.
        """
        measured = self._measure(dialogue)
        if measured.chunks is None or measured.vectors is None:
            measured.chunks = self._chunks(measured)
            texts = ["\n".join(turn_text(dialogue.turns[p]) for p in chunk) for chunk in measured.chunks]
            measured.vectors = self.encoder.encode(texts)
        cap = self.config.rag_tokens
        cap = measured.costs.of(shown) if cap is None else cap
        cosines = measured.vectors @ self.encoder.encode([question.text])[0]
        chosen: list[int] = []
        for number in torch.argsort(cosines, descending=True, stable=True).tolist():
            wider = sorted([*chosen, *measured.chunks[number]])
            if chosen and measured.costs.of(wider) > cap:
                break
            chosen = wider
        return chosen

    def _measure(self, dialogue: Dialogue) -> _Measured:
        # by identity: hashing a dialogue's content takes longer than all the rest
        if self._measured is None or self._measured.dialogue is not dialogue:
            self._measured = _Measured(dialogue, prompt_costs(dialogue, self.encoder))
        return self._measured

    def _chunks(self, measured: _Measured) -> list[range]:
        chunks: list[range] = []
        spent = 0
        for position, tokens in enumerate(measured.costs.turns):
            last = chunks[-1] if chunks else None
            joins = last is not None and measured.costs.session_of[last.start] == measured.costs.session_of[position]
            if last is not None and joins and spent + tokens <= self.config.chunk_tokens:
                chunks[-1], spent = range(last.start, position + 1), spent + tokens
            else:
                chunks.append(range(position, position + 1))
                spent = tokens
        return chunks
