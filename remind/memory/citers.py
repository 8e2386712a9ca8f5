"""Who says what an answer cites: its reader, or in its place gold evidence, with or without noise, or words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from remind.core.files import sha256_json
from remind.data.dialogue import Question
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query
from remind.text.words import fillers, stem, words

#: reader: a reader that cites, which is asked elsewhere. oracle: every memory with gold evidence among its sources.
#: noisy: these with probability `USEFUL`, others with `USELESS`. lexical: every memory with at least `SHARED` of the
#: question's words; sees no gold.
CiterName = Literal["none", "reader", "oracle", "noisy", "lexical"]
#: Citers that look at gold evidence.
GOLD = ("oracle", "noisy")
#: Recalls of useful and of useless memories (RMM, Table 3): the latter are cited where they are not left out.
USEFUL, USELESS = 0.911, 0.154
SHARED = 0.5


def cited(citer: CiterName, question: Question, memories: Sequence[Memory]) -> frozenset[int] | None:
    """Places of the memories that an answer would cite; the same for the same question and memories.

    Returns:
        None: it cannot tell, and nothing may be learned: there is no gold evidence, or no citer here.
    """
    if citer in ("none", "reader") or (citer in GOLD and not question.evidence):
        return None
    if citer == "lexical":
        wanted = {stem(word) for word in words(question.text) if word not in fillers()}
        least = max(1.0, SHARED * len(wanted))
        has = [len(wanted & {stem(word) for word in words(memory.text)}) >= least for memory in memories]
    else:
        gold = {*question.evidence}
        has = [not gold.isdisjoint(memory.sources or ()) for memory in memories]
    if citer == "noisy":
        seed = int(sha256_json([question.id, [memory.id for memory in memories]])[:16], 16)
        has = (np.random.default_rng(seed).random(len(has)) < np.where(has, USEFUL, USELESS)).tolist()
    return frozenset(place for place, one in enumerate(has) if one)


def tell(citer: CiterName, bank: Bank, question: Question, k: int) -> None:
    """Tell a bank which of its best k memories an answer to the question would cite."""
    if citer in ("none", "reader"):
        return
    found = bank.retrieve(Query.of(question), k)
    if (places := cited(citer, question, found.memories)) is not None:
        bank.feedback(found, places)


def warning(citer: CiterName) -> str | None:
    """What every report has to say where systems learned; None: they did not, or from shared words."""
    if citer == "reader":
        return (
            "Systems that learn were told after each question which of their memories the reader cites. Their rows "
            "depend on the order of the questions."
        )
    if citer not in GOLD:
        return None
    return (
        f"Systems that learn were told after each question which of their memories the {citer} citer cites, which is "
        "taken from gold evidence. Their rows show what the update rule does, and are not comparable with the others."
    )
