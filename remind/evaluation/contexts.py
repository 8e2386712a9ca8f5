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
        if not (isinstance(context, Context) and isinstance(context.text, str)):
            what = f"{type(context).__name__}, not a Context with text"
            raise DataError(f"context provider {provider_name(provider)} gave {what}", record=question.id)
    return list(found)


def provider_name(provider: Any) -> str:
    """Its own name, else that of its class."""
    return str(getattr(provider, "name", type(provider).__name__))


class Contexts:
    """Choices of turns of a dialogue, as ascending positions in `Dialogue.turns`. Tokens are of the encoder.

    Args:
        encoder: counts tokens; its cosine ranks chunks.
        config: caps.
    """

    def __init__(self, encoder: SentenceEncoder, config: ContextConfig, dialogue: Dialogue) -> None:
        self.encoder, self.config, self.dialogue = encoder, config, dialogue
        self._costs = prompt_costs(dialogue, encoder)

    @cached_property
    def full(self) -> list[int]:
        """Every turn, or as many of the newest as fit `full_tokens` together; at least one."""
        turns = range(len(self.dialogue.turns))
        parts = [turns[-count:] for count in range(1, len(turns) + 1)]
        return list(parts[max(0, bisect_right(parts, self.config.full_tokens, key=self._costs.of) - 1)])

    def rag(self, question: Question, shown: Sequence[int]) -> list[int]:
        """The chunks with the highest cosine to the question (ties: earlier first) up to the first that does not fit.

        Args:
            shown: positions that x0 shows; what they cost is the cap where `rag_tokens` is None.
        """
        cap = self.config.rag_tokens
        cap = self._costs.of(shown) if cap is None else cap
        cosines = self._vectors @ self.encoder.encode([question.text])[0]
        chosen: list[int] = []
        for number in torch.argsort(cosines, descending=True, stable=True).tolist():
            wider = sorted([*chosen, *self._chunks[number]])
            if chosen and self._costs.of(wider) > cap:
                break
            chosen = wider
        return chosen

    @cached_property
    def _chunks(self) -> list[range]:
        """Whole turns of one session, up to a number of tokens."""
        chunks, spent, session_of = list[range](), 0, self._costs.session_of
        for position, tokens in enumerate(self._costs.turns):
            joins = bool(chunks) and session_of[chunks[-1].start] == session_of[position]
            if joins and spent + tokens <= self.config.chunk_tokens:
                chunks[-1], spent = range(chunks[-1].start, position + 1), spent + tokens
            else:
                chunks.append(range(position, position + 1))
                spent = tokens
        return chunks

    @cached_property
    def _vectors(self) -> Tensor:
        turns = self.dialogue.turns
        return self.encoder.encode(["\n".join(turn_text(turns[p]) for p in chunk) for chunk in self._chunks])
