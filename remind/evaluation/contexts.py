"""Which turns of a dialogue a condition shows, within a cap on tokens: all of them, naive chunks, the gold evidence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.data.dialogue import Dialogue, Question
from remind.perception.index import Costs, prompt_costs
from remind.perception.segment import turn_text

if TYPE_CHECKING:
    from remind.evaluation.config import ContextConfig
    from remind.models.encoder import SentenceEncoder

#: Dialogues whose counts and vectors stay in memory; questions come dialogue by dialogue.
_HELD = 2


@dataclass
class _Known:
    dialogue: Dialogue
    costs: Costs
    session_of: tuple[int, ...]
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
        self._held: OrderedDict[int, _Known] = OrderedDict()

    def cost(self, dialogue: Dialogue, positions: Sequence[int]) -> int:
        """Tokens of a dialogue section that shows these ascending positions."""
        known = self._known(dialogue)
        return known.costs.of(positions, known.session_of)

    def full(self, dialogue: Dialogue) -> list[int]:
        """Every turn, or as many of the newest (oldest) as fit `full_tokens` together; at least one."""
        known, last = self._known(dialogue), len(dialogue.turns) - 1
        newest = self.config.keep == "newest"
        kept: list[int] = []
        spent, session = 0, None
        for position in range(last, -1, -1) if newest else range(last + 1):
            here = known.session_of[position]
            price = known.costs.turns[position] + (known.costs.headings[here] if here != session else 0)
            if kept and spent + price > self.config.full_tokens:
                break
            kept.append(position)
            spent, session = spent + price, here
        return sorted(kept)

    def rag(self, dialogue: Dialogue, question: Question, shown: Sequence[int]) -> list[int]:
        """The chunks with the highest cosine to the question (ties: earlier first) up to the first that does not fit.

        Args:
            shown: positions that x0 shows; what they cost is the cap where `rag_tokens` is None.
        """
        known = self._known(dialogue)
        if known.chunks is None or known.vectors is None:
            known.chunks = self._chunks(known)
            texts = ["\n".join(turn_text(dialogue.turns[p]) for p in chunk) for chunk in known.chunks]
            known.vectors = self.encoder.encode(texts)
        cap = self.config.rag_tokens
        cap = known.costs.of(shown, known.session_of) if cap is None else cap
        cosines = known.vectors @ self.encoder.encode([question.text])[0]
        kept: list[int] = []
        for number in torch.argsort(cosines, descending=True, stable=True).tolist():
            wider = sorted([*kept, *known.chunks[number]])
            if kept and known.costs.of(wider, known.session_of) > cap:
                break
            kept = wider
        return kept

    def gold(self, dialogue: Dialogue, question: Question) -> list[int]:
        """The gold evidence turns and those with a gold image."""
        wanted = set(question.images)
        shown = (p for p, turn in enumerate(dialogue.turns) if wanted & {image.index for image in turn.images})
        return sorted({*(dialogue.positions[turn_id] for turn_id in question.evidence), *shown})

    def _known(self, dialogue: Dialogue) -> _Known:
        # by identity: hashing a dialogue's content takes longer than all the rest
        known = self._held.get(id(dialogue))
        if known is None or known.dialogue is not dialogue:
            sessions = (number for number, session in enumerate(dialogue.sessions) for _ in session.turns)
            known = _Known(dialogue, prompt_costs(dialogue, self.encoder), tuple(sessions))
            self._held[id(dialogue)] = known
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(id(dialogue))
        return known

    def _chunks(self, known: _Known) -> list[range]:
        chunks: list[range] = []
        spent = 0
        for position, tokens in enumerate(known.costs.turns):
            last = chunks[-1] if chunks else None
            joins = last is not None and known.session_of[last.start] == known.session_of[position]
            if last is not None and joins and spent + tokens <= self.config.chunk_tokens:
                chunks[-1], spent = range(last.start, position + 1), spent + tokens
            else:
                chunks.append(range(position, position + 1))
                spent = tokens
        return chunks
