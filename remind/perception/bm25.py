"""BM25 over the turns of a dialogue (bm25s, Lucene's variant), as tensors that a cache can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class BM25:
    """BM25 over stemmed documents.

    Args:
        documents: stems of each.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self.n_documents = len(documents)
        #: Sorted, so that equal documents give equal files.
        self.terms = sorted({term for document in documents for term in document})
        self._model = self._empty_model()
        if self.terms:
            numbers = self._model.vocab_dict
            ids = [[numbers[term] for term in document] for document in documents]
            self._model.index((ids, numbers), create_empty_token=False, show_progress=False)

    @classmethod
    def from_tensors(cls, n_documents: int, terms: Sequence[str], tensors: Mapping[str, Tensor]) -> BM25:
        """The index whose `terms` and `tensors()` these are; nothing is copied."""
        bm25 = cls([])
        bm25.n_documents, bm25.terms = n_documents, list(terms)
        bm25._model = bm25._empty_model()
        bm25._model.scores = {name: tensor.numpy() for name, tensor in tensors.items()} | {"num_docs": n_documents}
        return bm25

    def tensors(self) -> dict[str, Tensor]:
        """bm25s's sparse matrix [documents, terms]: data float32, indices int32, indptr int64; empty without terms."""
        if not self.terms:
            return {}
        return {name: torch.from_numpy(self._model.scores[name]) for name in ("data", "indices", "indptr")}

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """Score of every document, float64 [n]; zeros if no query term occurs."""
        ids = self._model.get_tokens_ids(query)
        if not ids:
            return np.zeros(self.n_documents)
        return np.asarray(self._model.get_scores_from_ids(ids), dtype=np.float64)

    def _empty_model(self) -> Any:
        import bm25s

        model = bm25s.BM25()
        model.vocab_dict = {term: number for number, term in enumerate(self.terms)}
        # Lucene's variant has none; bm25s sets it only when it indexes or loads
        model.nonoccurrence_array = None
        return model
