"""Ranking the memories of a bank for a text: by cosine, by BM25, or by both. A memory has the score of its best key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from torch import Tensor

from remind.memory.store import Store
from remind.models.encoder import SentenceEncoder
from remind.perception.index import BM25
from remind.perception.retrieve import by_falling, standardise
from remind.text.words import stems

#: dense: cosine. bm25: stemmed words. hybrid: the sum of both as z-scores over all keys.
Method = Literal["dense", "bm25", "hybrid"]


class Ranker:
    """Ranks the memories of one bank; what it needs of all keys is read once for each state of the bank.

    Args:
        store: the bank's.
        encoder: of the keys.
    """

    def __init__(self, store: Store, encoder: SentenceEncoder) -> None:
        self.store, self.encoder = store, encoder
        self._version = -1
        self._vectors: Tensor | None = None

    def rank(self, text: str, method: Method) -> Iterator[tuple[int, float]]:
        """All memories with keys as (number, score), best first; of equal ones the one with the earlier key."""
        if method == "dense":
            # one at a time: vectors differ in the last bits with the batch they were encoded in
            return self.store.nearest(self.encoder.encode([text])[0])
        return self.best(self.scores(text, method))

    def scores(self, text: str, method: Method) -> np.ndarray:
        """Score of every key, in the order of `Store.keys` [n]."""
        self._read()
        lexical = self._bm25.scores(stems(text))
        if method == "bm25":
            return lexical
        cosines = self.cosines(text)
        return cosines if method == "dense" else standardise(lexical) + standardise(cosines)

    def cosines(self, text: str) -> np.ndarray:
        """Cosine of every key's vector with the text's [n]."""
        self._read()
        if self._vectors is None:
            self._vectors = self.store.vectors(self._rows)
        return (self._vectors @ self.encoder.encode([text])[0]).double().numpy()

    def best(self, scores: np.ndarray) -> Iterator[tuple[int, float]]:
        """Memories by falling score of their best key, given the scores of all keys [n]."""
        seen: set[int] = set()
        for place in by_falling(scores):
            if (owner := int(self.owners[place])) not in seen:
                seen.add(owner)
                yield owner, float(scores[place])

    @property
    def owners(self) -> np.ndarray:
        """Number of every key's memory [n]."""
        self._read()
        return self._owners

    def _read(self) -> None:
        if self._version != self.store.version:
            self._rows, self._owners, texts = self.store.keys()
            # words are searched where there are none
            self._vectors = None
            self._bm25 = BM25([stems(text) for text in texts])
            self._version = self.store.version


def recent(store: Store) -> Iterable[tuple[int, float]]:
    """All memories, newest first; the score is the number."""
    return ((number, float(number)) for number in reversed(store.numbers()))
