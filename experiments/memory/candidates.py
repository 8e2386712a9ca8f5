"""Questions with the candidates that a retriever gives a reranker: single turns of their dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from experiments.evidence.data import DialogueQuestions
from remind.grounding.fusion import standardise_turns
from remind.perception import Perception
from remind.text.words import stems

#: Tokens at which rankings are compared besides their best few: about what LoCoMo's five nearest turns take.
BUDGET = 150


@dataclass(frozen=True)
class Ranked:
    """A question and its K candidates, best first by the retriever.

    Attributes:
        name: dialogue and number of the question. dialogue: its id.
        query: unit vector [d]. memories: unit rows [K, d].
        gold: whether a candidate is evidence, bool [K]. wanted: evidence turns of the question, found or not.
        tokens: of every candidate's lines [K].
        dense, lexical, hybrid: cosine, BM25, and the sum of their z-scores over all turns, float64 [K].
        base: logits that the candidates bring [K]; None: the cosine.
    """

    name: str
    dialogue: str
    query: np.ndarray
    memories: np.ndarray
    gold: np.ndarray
    wanted: int
    tokens: np.ndarray
    dense: np.ndarray
    lexical: np.ndarray
    hybrid: np.ndarray
    base: np.ndarray | None

    def shares(self, scores: np.ndarray, most: int) -> tuple[float, int, float]:
        """What ranking by these scores [K] finds: recall of the best `most`, their tokens, recall within `BUDGET`.

        Recall is the share of the question's evidence. Within the budget, candidates that do not fit are passed over.
        """
        order = np.argsort(-scores, kind="stable")
        best, left, held = order[:most], BUDGET, 0
        for position in order.tolist():
            if self.tokens[position] <= left:
                left -= int(self.tokens[position])
                held += int(self.gold[position])
        return float(self.gold[best].sum()) / self.wanted, int(self.tokens[best].sum()), held / self.wanted


@dataclass(frozen=True)
class Encoded:
    """A dialogue with its questions as vectors.

    Attributes:
        turns: unit rows [n, d]. questions: unit rows [Q, d]. lexical: BM25 [n, Q]. tokens: of every turn's lines [n].
    """

    asked: DialogueQuestions
    turns: Tensor
    questions: Tensor
    lexical: Tensor
    tokens: np.ndarray


def encode(asked: DialogueQuestions, perception: Perception) -> Encoded:
    """Vectors, BM25 and lengths of all turns, by the index of perception, which a cache on disk can hold."""
    index = perception.index(asked.dialogue)
    texts = [question.text for question in asked.questions]
    lexical = torch.stack([torch.from_numpy(index.bm25.scores(stems(text))) for text in texts], 1)
    return Encoded(asked, index.vectors, perception.encoder.encode(texts), lexical, np.asarray(index.costs.turns))


def standardise(values: Tensor) -> Tensor:
    """z-scores down the columns; zeros where all values agree."""
    return standardise_turns(values, torch.ones(len(values), 1, dtype=torch.bool))


def candidates(encoded: Encoded, source: Literal["dense", "hybrid"], count: int) -> list[Ranked]:
    """The first `count` turns for every question, by the cosine or by the hybrid sum; ties: earlier first."""
    dense = (encoded.turns @ encoded.questions.T).double()
    hybrid = standardise(dense) + standardise(encoded.lexical)
    found = []
    for number, question in enumerate(encoded.questions):
        ranked = (dense if source == "dense" else hybrid)[:, number]
        best = ranked.argsort(descending=True, stable=True)[:count]
        kept = {
            name: values[best, number].numpy()
            for name, values in (("dense", dense), ("lexical", encoded.lexical), ("hybrid", hybrid))
        }
        gold, dialogue = encoded.asked.gold[number], encoded.asked.dialogue.id
        found.append(
            Ranked(
                name=f"{dialogue} {number}",
                dialogue=dialogue,
                query=question.numpy(),
                memories=encoded.turns[best].numpy(),
                gold=torch.isin(best, gold).numpy(),
                wanted=len(gold),
                tokens=encoded.tokens[best.numpy()],
                base=kept["hybrid"] if source == "hybrid" else None,
                **kept,
            )
        )
    return found


def fixed(question: Ranked) -> np.ndarray:
    """z(cosine) + z(BM25) over the candidates: a reranker that learns nothing; float64 [K]."""
    return with_lexical(question, question.dense)


def with_lexical(question: Ranked, scores: np.ndarray) -> np.ndarray:
    """z of some scores plus z(BM25), both over the candidates; float64 [K]."""
    both = torch.from_numpy(np.stack([scores, question.lexical], 1))
    return standardise(both).sum(1).numpy()


def with_length(question: Ranked) -> np.ndarray:
    """z(cosine) + z(ln tokens) over the candidates: a control without labels; float64 [K]."""
    both = torch.from_numpy(np.stack([question.dense, np.log(question.tokens)], 1))
    return standardise(both).sum(1).numpy()


def means(dialogues: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray]:
    """Mean vector of all their turns and of all their questions, each [d]."""
    turns, questions = torch.cat([one.turns for one in dialogues]), torch.cat([one.questions for one in dialogues])
    return turns.mean(0).numpy(), questions.mean(0).numpy()


def centred(turns: np.ndarray, questions: np.ndarray, question: Ranked) -> np.ndarray:
    """Cosine after a mean turn and a mean question [d] are taken off: a control without labels; float64 [K]."""
    moved = question.memories - turns
    return np.asarray(moved @ (question.query - questions) / np.linalg.norm(moved, axis=1), np.float64)
