"""What questions are answered from: context providers, and which turns of a dialogue fit a cap on tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question
from remind.models.generate import Generation
from remind.perception.perceive import prompt_costs
from remind.states.pyramid import blind, turn_text

if TYPE_CHECKING:
    from remind.evaluation.config import ContextConfig
    from remind.models.encoder import SentenceEncoder


@dataclass(frozen=True)
class Context:
    """What a provider gives for a question.

    Attributes:
        text: stands in the prompt where x0 has the retrieved dialogue.
        sources: ids of the turns it shows or was made of; None: not known, so that no evidence recall can be told.
        output: the answer, of a system that gives one itself; no model is asked then.
    """

    text: str
    sources: tuple[str, ...] | None = None
    output: Generation | None = None


def provide(provider: Any, questions: Sequence[Question], dialogue: Dialogue) -> list[Context]:
    """A provider's contexts of questions about a dialogue, which it sees without gold.

    A provider has `context(question, dialogue) -> Context`; or `contexts(questions, dialogue) -> list[Context]`, for
    all questions about a dialogue at once. It may have a `name`; and `measures`, if it is given the gold as well, since
    it records what of it was found.

    Raises:
        DataError: what it gives is no context.
    """
    asked = [blind(question) for question in questions]
    if hasattr(provider, "contexts"):
        found = provider.contexts(questions if getattr(provider, "measures", False) else asked, dialogue)
    else:
        found = [provider.context(question, dialogue) for question in asked]
    for question, context in zip(questions, found, strict=True):
        wrong = [f"{type(context).__name__}, not a Context with text"]
        if isinstance(context, Context) and isinstance(context.text, str):
            turns = (turn for turn in context.sources or () if turn not in dialogue.positions)
            wrong = [f"turn {turn!r}, which is not in the dialogue" for turn in turns]
        if wrong:
            raise DataError(f"context provider {provider_name(provider)} gave {wrong[0]}", record=question.id)
    return list(found)


def provider_name(provider: Any) -> str:
    """Its own name, else that of its class."""
    return str(getattr(provider, "name", type(provider).__name__))


class _Measured:
    """A dialogue's turns in tokens, and its chunks: whole turns of one session, up to a number of tokens."""

    def __init__(self, dialogue: Dialogue, encoder: SentenceEncoder, chunk_tokens: int) -> None:
        self.dialogue, self._encoder, self._chunk_tokens = dialogue, encoder, chunk_tokens
        self._costs = prompt_costs(dialogue, encoder)

    def tokens(self, positions: Sequence[int]) -> int:
        """Of some turns together, as a prompt shows them."""
        return self._costs.of(positions)

    @cached_property
    def chunks(self) -> list[range]:
        chunks, spent, session_of = list[range](), 0, self._costs.session_of
        for position, tokens in enumerate(self._costs.turns):
            joins = bool(chunks) and session_of[chunks[-1].start] == session_of[position]
            if joins and spent + tokens <= self._chunk_tokens:
                chunks[-1], spent = range(chunks[-1].start, position + 1), spent + tokens
            else:
                chunks.append(range(position, position + 1))
                spent = tokens
        return chunks

    @cached_property
    def vectors(self) -> Tensor:
        """Of the chunks."""
        turns = self.dialogue.turns
        return self._encoder.encode(["\n".join(turn_text(turns[p]) for p in chunk) for chunk in self.chunks])


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
        """Every turn, or as many of the newest as fit `full_tokens` together; at least one."""
        measured, turns = self._measure(dialogue), range(len(dialogue.turns))
        parts = [turns[-count:] for count in range(1, len(turns) + 1)]
        return list(parts[max(0, bisect_right(parts, self.config.full_tokens, key=measured.tokens) - 1)])

    def rag(self, dialogue: Dialogue, question: Question, shown: Sequence[int]) -> list[int]:
        """The chunks with the highest cosine to the question (ties: earlier first) up to the first that does not fit.

        Args:
            shown: positions that x0 shows; what they cost is the cap where `rag_tokens` is None.
        """
        measured, cap = self._measure(dialogue), self.config.rag_tokens
        cap = measured.tokens(shown) if cap is None else cap
        cosines = measured.vectors @ self.encoder.encode([question.text])[0]
        chosen: list[int] = []
        for number in torch.argsort(cosines, descending=True, stable=True).tolist():
            wider = sorted([*chosen, *measured.chunks[number]])
            if chosen and measured.tokens(wider) > cap:
                break
            chosen = wider
        return chosen

    def _measure(self, dialogue: Dialogue) -> _Measured:
        # by identity: hashing a dialogue's content takes longer than all the rest
        if self._measured is None or self._measured.dialogue is not dialogue:
            self._measured = _Measured(dialogue, self.encoder, self.config.chunk_tokens)
        return self._measured
